"""The one table of options: parsing, environment names, docs and ``describe`` derive from it."""

from collections.abc import Mapping
from types import MappingProxyType
from urllib.parse import urlsplit

from vllm_hicache import option_kinds as kinds
from vllm_hicache.host_memory import AUTO_FRACTION, HostMemory
from vllm_hicache.option import ENV_PREFIX, STORAGE, Option
from vllm_hicache.quantities import KIB
from vllm_hicache.storage_options import STORAGE_TABLE

_URL = ("storage.url",)
_TIMEOUT = ("storage.url", "prefetch_policy=timeout")

_CHECKED = ("rank_consensus=report|raise|abort",)

_TOP_TABLE = (
    Option(
        "config_file",
        kinds.absolute_path(),
        None,
        "/etc/hicache.yaml",
        "YAML file with any of these keys; keys given elsewhere override it",
        nullable=True,
    ),
    Option(
        "host_memory",
        kinds.memory(),
        HostMemory("auto", AUTO_FRACTION),
        "8GiB",
        "host memory for the pool of each worker; unset, 0.8 of (available - 10 GiB) is shared "
        "by the workers of the host",
        nullable=True,
    ),
    Option(
        "page_size",
        kinds.whole(1, 1 << 20),
        None,
        256,
        "tokens of a page, the unit of match and storage; it and vLLM's block sizes must divide "
        "one another; unset: 256, or as few from 32 on as are 4 MiB where pages stay in host "
        "memory; 64 for latents (MLA), at most the smallest window, vLLM's block size with states",
        nullable=True,
    ),
    Option(
        "write_policy",
        kinds.choice("write_through", "write_through_selective", "write_back"),
        "write_through",
        "write_back",
        "when pages are saved to host memory: as soon as they are computed, when several requests "
        "have used them, or just before vLLM reuses their device blocks",
    ),
    Option(
        "save_after_uses",
        kinds.whole(1, 255),
        2,
        3,
        "requests that must have used a page before it is saved",
        ("write_policy=write_through_selective",),
    ),
    Option(
        "admission",
        kinds.choice("probation", "always"),
        "probation",
        "always",
        "whether a page that one request alone has used may take the place of one that several "
        "have used",
        ("eviction=lru|lfu|slru|priority",),
    ),
    Option(
        "pin_max_percent",
        kinds.whole(0, 90),
        25,
        50,
        "part of the host pool that requests may keep with the hint `pin_s`; 0 turns it off",
    ),
    Option(
        "eviction",
        kinds.choice("next_use", "lru", "lfu", "slru", "priority"),
        "next_use",
        "lru",
        "which page leaves a full host pool first",
    ),
    Option(
        "load_mode",
        kinds.choice("async", "layerwise"),
        "async",
        "layerwise",
        "how host pages return to the device: beside the steps of other requests, or in the step "
        "that reads them, each layer waiting for its own part",
    ),
    Option(
        "sync_load_max_ms",
        kinds.milliseconds(),
        3.0,
        3.0,
        "an asynchronous load predicted to be shorter runs before the step's forward, where vLLM "
        "has one batch in flight; 0 turns that off",
        ("load_mode=async",),
    ),
    Option(
        "skip_slow_loads",
        kinds.flag(),
        True,
        False,
        "a load or fetch that is predicted to take longer than computing its tokens is not made",
    ),
    Option(
        "draft_miss",
        kinds.choice("auto", "cut", "target_only"),
        "auto",
        "target_only",
        "what is done with pages that lack the draft state of this engine: their tokens are "
        "computed, or they are used with zeros in its place; `auto` computes where that is "
        "predicted to take at most 1 s, or is not known",
    ),
    Option(
        "defer_max_blocks",
        kinds.whole(0),
        2000,
        2000,
        "cached device blocks of all requests that may wait for a load or fetch; beyond it a "
        "request takes what is there",
    ),
    Option(
        "weights_id",
        kinds.label(),
        None,
        "llama-3-8b-2024-07",
        "name of the weights for stored pages, when they cannot be told from the model's files; "
        "change it whenever the weights change",
        _URL,
        nullable=True,
    ),
    Option(
        "fixed_weights",
        kinds.flag(),
        False,
        True,
        "the weights never change while the engine runs: resetting the cache keeps stored pages",
        _URL,
    ),
    Option(
        "fleet",
        kinds.fleet(),
        None,
        {"tp": [2, 4], "pp": [1, 2]},
        "parallel sizes of all engines that share the storage: gives the largest objects that "
        "each of them can read",
        _URL,
        nullable=True,
    ),
    Option(
        "storage_layer_partition",
        kinds.whole(0, 1 << 16),
        0,
        30,
        "layers of a stored object, equal for all engines that share it; 0 takes the pipeline "
        "stage of this engine",
        _URL,
    ),
    Option(
        "storage_head_partition",
        kinds.whole(0, 1 << 16),
        0,
        1,
        "KV heads of a stored object, equal for all engines that share it; 0 splits for tensor "
        "parallel size 8",
        _URL,
    ),
    Option(
        "min_object_bytes",
        kinds.size(bare_min=1),
        64 * KIB,
        "64KiB",
        "the engine refuses to start when a stored object would be smaller",
        _URL,
    ),
    Option(
        "prefetch_policy",
        kinds.choice("timeout", "best_effort", "wait_complete"),
        "timeout",
        "best_effort",
        "how long a waiting request is held for its fetch: up to a time, only until it could "
        "run, or to the end",
        _URL,
    ),
    Option(
        "prefetch_timeout_base_s",
        kinds.duration(0.0),
        1.0,
        "500ms",
        "longest wait for a fetch, apart from its length",
        _TIMEOUT,
    ),
    Option(
        "prefetch_timeout_per_1k_tokens_s",
        kinds.duration(0.0),
        0.25,
        0.25,
        "what each 1024 tokens of a fetch add to the longest wait",
        _TIMEOUT,
    ),
    Option(
        "prefetch_min_tokens",
        kinds.whole(0),
        256,
        256,
        "a fetch of fewer tokens is not started",
        _URL,
    ),
    Option(
        "prefetch_max_percent",
        kinds.whole(1, 100),
        50,
        30,
        "part of the host pool that all fetches together may fill at a time",
        _URL,
    ),
    Option(
        "prefetch_tenant_max_percent",
        kinds.whole(1, 100),
        25,
        10,
        "the same for the fetches of one tenant: requests with one `cache_salt`",
        _URL,
    ),
    Option(
        "prefetch_retry_s",
        kinds.duration(0.0),
        1.0,
        "500ms",
        "storage that had too little for a waiting request is asked again after so long; 0: never",
        _URL,
    ),
    Option(
        "prefetch_max_retries",
        kinds.whole(0, 1000),
        8,
        3,
        "how often storage may be asked again for one request, also because its pages left host",
        _URL,
    ),
    Option(
        "log_interval_s",
        kinds.duration(0.1),
        10.0,
        10.0,
        "time between two lines of activity in the log",
    ),
    Option(
        "kv_events",
        kinds.flag(),
        None,
        True,
        "publish KV cache events of host and storage; unset, when vLLM publishes its own and the "
        "model has one kind of blocks",
        nullable=True,
    ),
    Option(
        "control_address",
        kinds.control_address(),
        None,
        "unix:/run/hicache.sock",
        "where `hicache storage` reaches the engine: `unix:/PATH`, or "
        "`tcp:127.0.0.1:PORT` on this host only; with data parallelism rank n listens at `PATH.n` "
        "or `PORT + n`",
        nullable=True,
    ),
    Option(
        "control_token",
        kinds.secret(),
        None,
        "any 16 or more characters",
        "what the command has to show at `control_address`",
        ("control_address",),
        nullable=True,
    ),
    Option(
        "rank_consensus",
        kinds.choice("off", "report", "raise", "abort"),
        "off",
        "report",
        "compare what each worker did and name the first difference: in the log, by an error that "
        "stops the engine, or by ending its process at once",
    ),
    Option(
        "rank_consensus_events",
        kinds.whole(1, 1 << 20),
        256,
        1000,
        "last events of each worker that are written to a file when workers differ",
        _CHECKED,
    ),
    Option(
        "rank_consensus_folder",
        kinds.absolute_path(),
        None,
        "/var/log/hicache",
        "where these files go; unset, the folder for temporary files",
        _CHECKED,
        nullable=True,
    ),
    Option(
        "rank_consensus_stall_s",
        kinds.duration(0.1),
        60.0,
        "30s",
        "a worker that shows no progress for so long, while others went on, is named",
        _CHECKED,
    ),
)

_TABLE = (*_TOP_TABLE, *STORAGE_TABLE)
OPTIONS: Mapping[str, Option] = MappingProxyType({option.name: option for option in _TABLE})
TOP_OPTIONS = tuple(option for option in _TABLE if "." not in option.name)
STORAGE_OPTIONS = tuple(option for option in _TABLE if "." in option.name)
ENV_NAMES: Mapping[str, str] = MappingProxyType(
    {ENV_PREFIX + STORAGE.upper(): STORAGE} | {option.env_name: option.name for option in _TABLE}
)


def default_of(option: Option, url: object) -> object:
    """The value of an option that nobody gives, with this storage URL or None."""
    scheme = urlsplit(str(url)).scheme if url else ""
    return dict(option.schemes).get(scheme, option.default)


def unmet_need(option: Option, values: Mapping[str, object]) -> str | None:
    """What the option needs and ``values`` (by option name) do not have; None when it applies."""
    for need in option.needs:
        name, _, wanted = need.partition("=")
        value = values[name]
        if value is None:
            # Storage may be attached later; options of the storage itself come with it.
            is_of_storage = option.name.startswith(f"{STORAGE}.")
            if need == "storage.url" and not is_of_storage and values["control_address"]:
                continue
            return f"{name} to be set"
        if name == "storage.url":
            value = urlsplit(str(value)).scheme
        if wanted and value not in wanted.split("|"):
            allowed = " or ".join(f'"{choice}"' for choice in wanted.split("|"))
            return f"{'the scheme of ' * (name == 'storage.url')}{name} to be {allowed}"
    return None
