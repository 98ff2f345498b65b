"""Options that all benchmarks of whole engines share, and the engines that they describe."""

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vllm_hicache.benchmarks.arms import (
    ARMS,
    CONNECTORS,
    FILE_ARM,
    ConnectorSizes,
    connector_options,
    has_gpu,
    parse_arms,
    parse_more_options,
    why_not,
)
from vllm_hicache.benchmarks.engine_plan import EnginePlan
from vllm_hicache.benchmarks.model_shapes import SHAPES, Model, kv_bytes_per_token, model_of
from vllm_hicache.errors import ConfigError
from vllm_hicache.quantities import parse_bytes

SPARE_TOKENS = 64
MOST_PAGE_TOKENS = 256
"""A page of ours is not longer unless it is told to be."""
_LMCACHE_ADDRESS = "127.0.0.1:6555"


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a workload asks of an engine; tokens."""

    longest: int
    """Prompt and answer of the longest request."""
    distinct: int
    """KV of the whole workload."""
    concurrency: int


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Model, vLLM's own options, arms and output."""
    add = parser.add_argument
    add("--model", help="folder or name of a model; default: --shape tiny")
    add("--shape", choices=tuple(SHAPES), help="shape of a model, with weights without meaning")
    add("--dtype", default="auto")
    add("--block-size", type=int, default=16 if has_gpu() else 32, help="vLLM's tokens per block")
    add("--page-size", type=int, help="tokens of a page; by default, what the connector chooses")
    add("--max-batched-tokens", type=int, help="option of vLLM")
    add("--tensor-parallel-size", type=int, default=1, help="option of vLLM")
    add("--enforce-eager", action="store_true", help="option of vLLM")
    add(
        "--vs",
        default="none",
        metavar="ARMS",
        help=f"compared with, several with commas: {','.join(ARMS[1:])}",
    )
    add("--arms", metavar="ARMS", help="all arms in this order, in place of hicache and --vs")
    add(
        "--arm-options",
        action="append",
        default=[],
        metavar="ARM={JSON}",
        help="more options of an arm's connector; may be repeated",
    )
    add("--lmcache-python", metavar="PATH", help="interpreter that has LMCache and this package")
    add("--lmcache-address", default=_LMCACHE_ADDRESS, help="where its server listens meanwhile")
    add("--seed", type=int, default=0, help="of all prompts")
    add("--out", type=Path, help="folder for the JSON file and the plot")
    add("--dry-run", action="store_true", help="print what would run")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """What an engine that serves many clients is given besides."""
    add_model_options(parser)
    add = parser.add_argument
    add("--repeat", type=int, default=1, help="passes over all arms, one after another")
    add(
        "--device-kv-bytes",
        metavar="SIZE",
        help="vLLM's KV cache, such as 16GiB; default: a quarter of the workload's KV",
    )
    add("--host-memory", metavar="SIZE", help="of each arm, such as 64GiB; default: all its KV")
    add("--storage", metavar="FOLDER", help="for the pages of the arm hicache+file, which it adds")
    add("--in-process", action="store_true", help="the engine shares its clients' process")


def chosen_arms(options: argparse.Namespace) -> tuple[str, ...]:
    """Those of ``--arms``; else our own arm, those of ``--vs``, and files where a folder is."""
    if options.arms is not None:
        return parse_arms(options.arms)
    named = ["hicache", *(name for name in options.vs.split(",") if name)]
    if options.storage is not None and FILE_ARM not in named:
        named.append(FILE_ARM)
    return parse_arms(",".join(named))


def plan_engines(
    options: argparse.Namespace, sizes: Sizes, folder: Path, *, device_tokens: int | None = None
) -> list[EnginePlan]:
    """One engine for each arm: equal but for the connector.

    ``folder`` takes a shape's config and stored pages; ``device_tokens`` is what the device holds
    where the options do not say, by default a quarter of the workload.
    """
    check_counts(options)
    model = model_of(options, folder)
    if sizes.longest + SPARE_TOKENS > model.max_positions:
        raise ConfigError(
            f"the longest request has {sizes.longest} tokens; the model takes "
            f"{model.max_positions - SPARE_TOKENS}"
        )
    per_token = kv_bytes_per_token(model.config, options.dtype)
    device_bytes = (device_tokens or sizes.distinct // 4) * per_token
    engine = _engine_arguments(options, model, sizes, (device_bytes, per_token))
    host_bytes = _bytes("--host-memory", options.host_memory) or sizes.distinct * per_token
    more = parse_more_options(options.arm_options)
    storage = Path(options.storage) if options.storage is not None else folder / "pages"
    plans = []
    for arm in chosen_arms(options):
        is_ours = CONNECTORS[arm] == CONNECTORS["hicache"]
        connector = ConnectorSizes(
            # Ours is told the share of a worker, the others the sum of all.
            host_bytes=host_bytes // options.tensor_parallel_size if is_ours else host_bytes,
            page_size=options.page_size,
            storage=storage if arm == FILE_ARM else None,
            storage_bytes=2 * sizes.distinct * per_token + (64 << 20),
            more_options=more,
            lmcache_address=options.lmcache_address,
        )
        plans.append(
            EnginePlan(
                arm=arm,
                engine=engine,
                connector=CONNECTORS[arm],
                connector_options=connector_options(arm, connector),
                environment={},
                in_process=options.in_process,
                vocab_size=model.vocab_size,
                bytes_per_token=per_token,
                host_bytes=host_bytes if CONNECTORS[arm] else 0,
                storage=connector.storage,
            )
        )
    return plans


def _engine_arguments(
    options: argparse.Namespace, model: Model, sizes: Sizes, default: tuple[int, int]
) -> dict[str, object]:
    """``default``: bytes of the device's KV where none are given, and those of a token."""
    device_bytes, per_token = default
    # vLLM wants room for max_model_len, and keeps a block for itself.
    page_size = options.page_size or MOST_PAGE_TOKENS
    least_tokens = sizes.longest + SPARE_TOKENS + 2 * max(options.block_size, page_size)
    least_bytes = least_tokens * per_token
    given_bytes = _bytes("--device-kv-bytes", options.device_kv_bytes)
    if 0 < given_bytes < least_bytes:
        raise ConfigError(
            f"--device-kv-bytes {given_bytes:,} is too small: the longest request needs "
            f"{least_bytes:,}"
        )
    device_bytes = given_bytes or max(device_bytes, least_bytes)
    engine: dict[str, object] = {
        "model": model.name,
        "dtype": options.dtype,
        "load_format": model.load_format,
        "skip_tokenizer_init": True,
        "enforce_eager": options.enforce_eager or not has_gpu(),
        "max_model_len": sizes.longest + SPARE_TOKENS,
        "max_num_seqs": sizes.concurrency,
        "block_size": options.block_size,
        "enable_prefix_caching": True,
        "disable_log_stats": False,
        "tensor_parallel_size": options.tensor_parallel_size,
        "kv_cache_memory_bytes": device_bytes // options.tensor_parallel_size,
    }
    if options.max_batched_tokens:
        engine["max_num_batched_tokens"] = options.max_batched_tokens
    return engine


def check_counts(options: argparse.Namespace) -> None:
    """Raises ConfigError for sizes and counts below 1: 0 of them would measure nothing."""
    for name, value in vars(options).items():
        if type(value) is int and value < (0 if name in ("seed", "warm_up") else 1):
            raise ConfigError(f"--{name.replace('_', '-')} must be 1 or more, got {value}")


def _bytes(name: str, text: str | None) -> int:
    """0 where nothing is given."""
    if text is None:
        return 0
    try:
        return parse_bytes(int(text) if text.isdigit() else text)
    except ConfigError as error:
        raise ConfigError(f"{name} {text}: {error}") from None


@contextmanager
def work_folder() -> Iterator[Path]:
    """A folder for models, plans and pages, which goes away."""
    with tempfile.TemporaryDirectory(prefix="hicache-bench-") as name:
        yield Path(name)


def print_plans(plans: Sequence[EnginePlan], more: Mapping[str, object]) -> int:
    """What ``--dry-run`` shows: each engine, and why it cannot run here."""
    engines = [{**plan.as_json(), "not_here": why_not(plan.arm)} for plan in plans]
    print(json.dumps({**more, "engines": engines}, indent=1))
    return 0
