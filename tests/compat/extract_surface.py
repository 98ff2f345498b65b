"""Write the names and signatures of vLLM that we build on, read from its source without running it.

    python tests/compat/extract_surface.py FOLDER_OF_THE_VLLM_PACKAGE > surface.json

FOLDER is ``.../site-packages/vllm`` or that of an unpacked wheel; only its .py files are read.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

BASE = "distributed.kv_transfer.kv_connector.v1"

# Classes whose members we override, call or read, by module.
CLASSES = {
    f"{BASE}.base": (
        "KVConnectorBase_V1",
        "KVConnectorHandshakeMetadata",
        "KVConnectorMetadata",
        "KVConnectorTransferResults",
        "KVConnectorWorkerMetadata",
        "SupportsHMA",
    ),
    f"{BASE}.metrics": ("KVConnectorPromMetrics", "KVConnectorStats"),
    "config.cache": ("CacheConfig",),
    "config.kv_events": ("KVEventsConfig",),
    "config.kv_transfer": ("KVTransferConfig",),
    "config.load": ("LoadConfig",),
    "config.model": ("ModelConfig",),
    "config.parallel": ("ParallelConfig",),
    "config.scheduler": ("SchedulerConfig",),
    "config.speculative": ("SpeculativeConfig",),
    "config.vllm": ("VllmConfig",),
    "distributed.kv_events": ("BlockRemoved", "BlockStored", "KVCacheEvent", "KVEventBatch"),
    "distributed.kv_transfer.kv_connector.factory": ("KVConnectorFactory",),
    "distributed.kv_transfer.kv_connector.utils": ("KVOutputAggregator",),
    "distributed.parallel_state": ("GroupCoordinator",),
    "engine.arg_utils": ("EngineArgs",),
    "lora.request": ("LoRARequest",),
    "multimodal.inputs": ("MultiModalFeatureSpec", "PlaceholderRange"),
    "utils.argparse_utils": ("FlexibleArgumentParser",),
    "v1.core.block_pool": ("BlockPool",),
    "v1.core.kv_cache_manager": ("KVCacheBlocks", "KVCacheManager"),
    "v1.core.kv_cache_utils": ("FreeKVCacheBlockQueue", "KVCacheBlock"),
    "v1.core.sched.output": (
        "CachedRequestData",
        "KVConnectorBlockState",
        "NewRequestData",
        "SchedulerOutput",
    ),
    "v1.kv_cache_interface": (
        "AttentionSpec",
        "ChunkedLocalAttentionSpec",
        "FullAttentionSpec",
        "KVCacheConfig",
        "KVCacheGroupSpec",
        "KVCacheSpec",
        "KVCacheTensor",
        "MLAAttentionSpec",
        "MambaSpec",
        "SlidingWindowSpec",
        "UniformTypeKVCacheSpecs",
    ),
    "v1.metrics.stats": ("PrefixCacheStats", "SchedulerStats"),
    "v1.outputs": ("KVConnectorOutput", "ModelRunnerOutput"),
    "v1.request": ("Request",),
}

# Further modules of which we import functions, constants or enumerations.
MODULES = (
    "config",
    "engine.arg_utils",
    "forward_context",
    "logger",
    "model_executor.models.utils",
    "platforms",
    "sampling_params",
    "utils.argparse_utils",
    "utils.hashing",
    "utils.math_utils",
    "utils.torch_utils",
    "v1.attention.backend",
    "v1.attention.backends.cpu_attn",
    "v1.attention.backends.utils",
    "v1.core.kv_cache_coordinator",
    "v1.core.sched.scheduler",
    "v1.metrics.cache_hit_source",
    "v1.metrics.utils",
    "v1.serial_utils",
    "v1.utils",
)

# Functions that we call, wherever in these modules they are defined.
FUNCTIONS = frozenset(
    (
        "_get_attn_isa",
        "extract_layer_index",
        "generate_block_hash_extra_keys",
        "get_kv_cache_spec_kind",
        "get_kv_quant_mode",
        "get_tensor_model_parallel_rank",
        "get_world_group",
        "is_quantized_kv_cache",
        "kv_cache_dtype_str_to_dtype",
        "maybe_convert_block_hash",
        "resolve_block_hashes",
        "tensor_data",
        "to_event_extra_keys",
    )
)

Json = dict[str, object]


def extract(package: Path) -> Json:
    """The surface: release, names at the top of each module, members of each class."""
    classes: dict[str, Json] = {}
    functions: dict[str, Json] = {}
    modules: dict[str, list[str]] = {}
    for module in sorted({*CLASSES, *MODULES}):
        tree = ast.parse(_source(package, module))
        modules[f"vllm.{module}"] = sorted(set(_names_of_body(tree.body)))
        wanted = CLASSES.get(module, ())
        found = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        for name in wanted:
            if name in found:
                classes[name] = {"module": f"vllm.{module}", **_class(found[name])}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS:
                functions[node.name] = _signature(node, "staticmethod")
    return {
        "release": _release(package),
        "modules": modules,
        "classes": classes,
        "functions": functions,
    }


def _source(package: Path, module: str) -> str:
    path = package.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file.read_text() if file.exists() else ""


def _release(package: Path) -> str:
    pattern = r"^__version__.*?['\"]([^'\"]+)['\"]"
    match = re.search(pattern, _source(package, "_version"), re.MULTILINE)
    return match.group(1) if match else ""


def _class(node: ast.ClassDef) -> Json:
    methods: dict[str, Json] = {}
    attributes: set[str] = set()
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            kind = _method_kind(item)
            if kind == "property":
                attributes.add(item.name)
            else:
                methods[item.name] = {"kind": kind, **_signature(item, kind)}
            attributes.update(_assigned_to_self(item))
        else:
            attributes.update(_names_of_body([item]))
    return {
        "bases": [ast.unparse(base) for base in node.bases],
        "abstract": sorted(item.name for item in node.body if _is_abstract(item)),
        "attributes": sorted(attributes),
        "methods": dict(sorted(methods.items())),
    }


def _decorators(item: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [ast.unparse(decorator).split("(")[0] for decorator in item.decorator_list]


def _is_abstract(item: ast.stmt) -> bool:
    is_function = isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
    return is_function and "abstractmethod" in _decorators(item)


def _method_kind(item: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    for decorator in _decorators(item):
        if decorator.split(".")[-1] in {"property", "cached_property", "setter"}:
            return "property"
        if decorator in {"classmethod", "staticmethod"}:
            return decorator
    return "method"


def _signature(item: ast.FunctionDef | ast.AsyncFunctionDef, kind: str) -> Json:
    """Parameters without self or cls, as [name, kind, has a default]."""
    arguments = item.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [False] * (len(positional) - len(arguments.defaults))
    defaults += [True] * len(arguments.defaults)
    rows: list[list[object]] = [
        [argument.arg, "positional", has_default]
        for argument, has_default in zip(positional, defaults, strict=True)
    ]
    if kind != "staticmethod":
        rows = rows[1:]
    if arguments.vararg:
        rows.append([arguments.vararg.arg, "var_positional", True])
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        rows.append([argument.arg, "keyword", default is not None])
    if arguments.kwarg:
        rows.append([arguments.kwarg.arg, "var_keyword", True])
    return {"parameters": rows}


def _assigned_to_self(item: ast.AST) -> Iterator[str]:
    for node in ast.walk(item):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            yield node.attr


def _names_of_body(body: list[ast.stmt]) -> Iterator[str]:
    """Names that statements bind, also inside if, try and with at the same level."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            yield from _targets(node)
        else:
            for field in ("body", "orelse", "handlers", "finalbody"):
                yield from _names_of_body(getattr(node, field, []))


def _targets(node: ast.stmt) -> Iterator[str]:
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    for target in targets:
        for name in ast.walk(target) if target is not None else ():
            if isinstance(name, ast.Name):
                yield name.id


def render(value: object, indent: str = "") -> str:
    """JSON with a line for each method and for each list of names."""
    if not isinstance(value, dict) or "parameters" in value:
        return json.dumps(value)
    inner = indent + " "
    rows = [f"{inner}{json.dumps(key)}: {render(value[key], inner)}" for key in sorted(value)]
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"


def main() -> None:
    """Print the surface, the same for the same release."""
    sys.stdout.write(render(extract(Path(sys.argv[1]))) + "\n")


if __name__ == "__main__":
    main()
