"""``hicache doctor``: do this machine, this configuration and this storage fit together?"""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from vllm_hicache.config import HiCacheConfig
from vllm_hicache.config_sources import read_sources
from vllm_hicache.doctor_host import check_entry_point, check_memory, describe_versions
from vllm_hicache.doctor_report import DoctorReport
from vllm_hicache.doctor_storage import PROBE_BYTES, check_storage
from vllm_hicache.errors import ConfigError
from vllm_hicache.masking import mask_url
from vllm_hicache.namespace_records import encode_record
from vllm_hicache.option import STORAGE

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from vllm_hicache.connectors.model_geometry import ModelGeometry

SMALL_OBJECT_BYTES = 512 << 10
_TRANSFER = {
    "kv_connector": "HiCacheConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
_EPILOG = (
    "Further arguments go to vLLM, as for `vllm serve`: --tensor-parallel-size, --block-size, "
    "--dtype and all others; they need --model. Exit status: 0 all well, 1 a check failed, 2 the "
    "configuration cannot be used."
)


def add_parser(commands: "_SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command's options."""
    parser = commands.add_parser(
        "doctor",
        help="check versions, memory, configuration, storage and a model's namespace",
        description="Looks at everything that an engine with the connector needs, starts none.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("--model", help="folder or name of a model: its namespace and grid, too")
    parser.add_argument(
        "--kv-transfer-config",
        type=_transfer_config,
        default=_TRANSFER,
        metavar="JSON",
        help="as for vllm serve; without it, what HICACHE_* variables say",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run, takes_engine_arguments=True)


def _transfer_config(text: str) -> dict[str, object]:
    try:
        table = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from None
    if not isinstance(table, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return table


def run(options: argparse.Namespace) -> int:
    """Look, print what was found, and return 0, 1 or 2."""
    if options.engine_arguments and options.model is None:
        raise ConfigError(f"{' '.join(options.engine_arguments)}: arguments of vLLM need --model")
    report = DoctorReport()
    _examine(report, options)
    print(report.as_json() if options.json else report.as_text())
    return report.exit_status


def _examine(report: DoctorReport, options: argparse.Namespace) -> None:
    _check_versions(report)
    check_entry_point(report)
    config = _check_config(report, options.kv_transfer_config)
    with redirect_stdout(sys.stderr):  # vLLM logs to what it finds as its standard output
        geometry = _check_model(report, options) if options.model and config else None
    check_memory(report, config, geometry.num_workers if geometry else 1)
    if config is None:
        return
    if config.storage is None:
        report.add("storage", "note", "none is configured: pages live in host memory only")
        return
    is_shared = geometry is not None and geometry.is_proven
    check_storage(
        report,
        config.storage,
        encode_record(geometry.namespace) if geometry and is_shared else None,
        geometry.smallest_object_bytes if geometry else PROBE_BYTES,
    )


def _check_versions(report: DoctorReport) -> None:
    from vllm_hicache.connectors.supported_vllm import SUPPORTED, check_vllm_version

    describe_versions(report, SUPPORTED)
    try:
        report.add("vLLM", "ok", f"{check_vllm_version()} is supported")
    except ConfigError as error:
        report.add("vLLM", "failed", str(error), f"install vLLM {SUPPORTED}")


def _check_config(report: DoctorReport, transfer: Mapping[str, object]) -> HiCacheConfig | None:
    """The configuration in effect, and where each option that was given comes from."""
    extra = transfer.get("kv_connector_extra_config") or {}
    advice = "docs/configuration.md lists every option"
    if not isinstance(extra, Mapping):
        report.add("configuration", "refused", "kv_connector_extra_config must be a table", advice)
        return None
    try:
        config = HiCacheConfig.parse(extra)
    except ConfigError as error:
        report.add("configuration", "refused", mask_url(str(error)), advice)
        return None
    given = read_sources(extra, os.environ, [])
    report.facts["configuration"] = config.describe()
    report.facts["given_by"] = {
        name: "kv_connector_extra_config" if entry.where in (name, STORAGE) else entry.where
        for name, entry in sorted(given.items())
    }
    report.add("configuration", "ok", f"{len(given)} option(s) given, all understood")
    return config


def _check_model(report: DoctorReport, options: argparse.Namespace) -> "ModelGeometry | None":
    try:
        from vllm_hicache.connectors.model_geometry import model_geometry
    except ImportError as error:
        report.add("model", "failed", f"vLLM cannot be imported: {error}", "install vLLM")
        return None
    transfer = json.dumps({**_TRANSFER, **options.kv_transfer_config})
    try:
        geometry = model_geometry(options.model, transfer, options.engine_arguments)
    except ConfigError as error:
        advice = "an engine with these arguments would not start, for the same reason"
        report.add("model", "refused", mask_url(str(error)), advice)
        return None
    record = json.loads(encode_record(geometry.namespace))
    digest = geometry.namespace.digest if geometry.is_proven else None
    report.facts["namespace"] = {"digest": digest, **record}
    report.facts["grid"] = {
        "objects": geometry.objects,
        "smallest_object_bytes": geometry.smallest_object_bytes,
    }
    _judge_model(report, geometry)
    return geometry


def _judge_model(report: DoctorReport, geometry: "ModelGeometry") -> None:
    if geometry.is_proven:
        report.add("namespace", "ok", geometry.namespace.digest)
    else:
        report.add(
            "namespace",
            "note",
            "the weights cannot be identified: stored pages are not found after a restart, nor by "
            "other engines",
            "set weights_id to say what the weights are",
        )
    size, least = geometry.smallest_object_bytes, geometry.config.min_object_bytes
    advice = "raise page_size, storage_layer_partition or storage_head_partition"
    if size < least:
        text = f"objects of {size} bytes, allowed are {least} (min_object_bytes) and more"
        report.add("grid", "refused", text, advice)
    elif size < SMALL_OBJECT_BYTES:
        report.add("grid", "note", f"small objects: {geometry.objects}", advice)
    else:
        report.add("grid", "ok", geometry.objects)
