"""What our source reads, calls and imports of vLLM, found in its syntax by following annotations.

A variable is known by its annotation or by what is assigned to it: with ``request: "Request"``,
``feature.mm_position`` inside ``for feature in request.mm_features`` is a read of
``MultiModalFeatureSpec.mm_position``. What cannot be followed is not reported.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

# Types of members that lead to further members; "[X]" is a sequence of X.
MEMBER_TYPES = {
    ("BlockPool", "blocks"): "[KVCacheBlock]",
    ("BlockPool", "free_block_queue"): "FreeKVCacheBlockQueue",
    ("FreeKVCacheBlockQueue", "fake_free_list_head"): "KVCacheBlock",
    ("FreeKVCacheBlockQueue", "fake_free_list_tail"): "KVCacheBlock",
    ("KVCacheConfig", "kv_cache_groups"): "[KVCacheGroupSpec]",
    ("KVCacheConfig", "kv_cache_tensors"): "[KVCacheTensor]",
    # What only some kinds have is read where they are told apart, by functions that name the kind.
    ("KVCacheGroupSpec", "kv_cache_spec"): "KVCacheSpec",
    ("KVCacheManager", "block_pool"): "BlockPool",
    ("MultiModalFeatureSpec", "mm_position"): "PlaceholderRange",
    ("Request", "lora_request"): "LoRARequest",
    ("Request", "mm_features"): "[MultiModalFeatureSpec]",
    ("SchedulerOutput", "kv_connector_block_state"): "KVConnectorBlockState",
    ("SchedulerOutput", "scheduled_cached_reqs"): "CachedRequestData",
    ("SchedulerOutput", "scheduled_new_reqs"): "[NewRequestData]",
    ("SpeculativeConfig", "draft_model_config"): "ModelConfig",
    ("VllmConfig", "cache_config"): "CacheConfig",
    ("VllmConfig", "kv_events_config"): "KVEventsConfig",
    ("VllmConfig", "kv_transfer_config"): "KVTransferConfig",
    ("VllmConfig", "load_config"): "LoadConfig",
    ("VllmConfig", "model_config"): "ModelConfig",
    ("VllmConfig", "parallel_config"): "ParallelConfig",
    ("VllmConfig", "scheduler_config"): "SchedulerConfig",
    ("VllmConfig", "speculative_config"): "SpeculativeConfig",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Call:
    """A call of ``owner.name`` (a method), or of ``name`` (a function or class of vLLM)."""

    owner: str
    name: str
    num_positional: int
    keywords: tuple[str, ...]
    has_star: bool


@dataclass
class Reads:
    """Everything found in a set of files, with where it was found first."""

    members: dict[tuple[str, str], str] = field(default_factory=dict)
    imports: dict[tuple[str, str], str] = field(default_factory=dict)
    calls: dict[Call, str] = field(default_factory=dict)


def find_reads(files: list[Path], known_classes: frozenset[str]) -> Reads:
    """Read the files; ``known_classes`` are the classes of vLLM that annotations may name."""
    reads = Reads()
    for file in files:
        tree = ast.parse(file.read_text())
        imported = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                for alias in node.names:
                    imported.add(alias.name)
                    key = (node.module or "", alias.name)
                    reads.imports.setdefault(key, f"{file.name}:{node.lineno}")
        _File(file.name, known_classes, imported, reads).visit(tree)
    return reads


class _File:
    def __init__(self, name: str, known: frozenset[str], imported: set[str], reads: Reads) -> None:
        self._name = name
        self._known = known
        self._imported = imported
        self._reads = reads

    def visit(self, tree: ast.Module) -> None:
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                functions = [f for f in node.body if isinstance(f, Function)]
                own: dict[str, str] = {}
                for _ in range(2):  # a method may use what a later one assigns
                    for function in functions:
                        own.update(self._self_types(node, function, own))
                for function in functions:
                    self._report(function, own)
            elif isinstance(node, Function):
                self._report(node, {})

    def _self_types(
        self, owner: ast.ClassDef, function: Function, own: dict[str, str]
    ) -> dict[str, str]:
        names = self._variables(function, own)
        found = {}
        for node in [*owner.body, *ast.walk(function)]:
            target = getattr(node, "target", None)
            if isinstance(node, ast.Assign):
                target = node.targets[0]
            if isinstance(node, ast.AnnAssign):
                kind = self._annotated(node.annotation)
            elif isinstance(node, ast.Assign):
                kind = self._type(node.value, names, own)
            else:
                continue
            if kind and isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                found[target.attr] = kind
            elif kind and isinstance(target, ast.Name) and node in owner.body:
                found[target.id] = kind
        return found

    def _variables(self, function: Function, own: dict[str, str]) -> dict[str, str]:
        names: dict[str, str] = {}
        for node in ast.walk(function):
            if isinstance(node, Function):
                arguments = node.args
                for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
                    kind = self._annotated(argument.annotation)
                    if kind:
                        names[argument.arg] = kind
        for _ in range(3):  # assignments may follow one another in any order of nodes
            for target, value, is_element in _bindings(function):
                kind = self._type(value, names, own)
                if is_element:
                    kind = kind[1:-1] if kind.startswith("[") else ""
                if kind and isinstance(target, ast.Name):
                    names.setdefault(target.id, kind)
        return names

    def _annotated(self, annotation: ast.expr | None) -> str:
        if annotation is None:
            return ""
        text = ast.unparse(annotation).replace("'", "").replace('"', "")
        sequence = re.fullmatch(r"(?:list|Sequence|Iterable)\[(\w+)\]", text)
        if sequence:
            return f"[{sequence.group(1)}]" if sequence.group(1) in self._known else ""
        words = [word.strip() for word in text.split("|")]
        return next((word for word in words if word in self._known), "")

    def _type(self, node: ast.expr, names: dict[str, str], own: dict[str, str]) -> str:
        if isinstance(node, ast.Name):
            return names.get(node.id, "")
        if isinstance(node, ast.BoolOp):
            return self._type(node.values[0], names, own)
        if isinstance(node, ast.Subscript):
            kind = self._type(node.value, names, own)
            return kind[1:-1] if kind.startswith("[") else ""
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                return own.get(node.attr, "")
            return MEMBER_TYPES.get((self._type(node.value, names, own), node.attr), "")
        return ""

    def _report(self, function: Function, own: dict[str, str]) -> None:
        names = self._variables(function, own)
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute):
                owner = self._type(node.value, names, own)
                if owner and not owner.startswith("["):
                    place = f"{self._name}:{node.lineno}"
                    self._reads.members.setdefault((owner, node.attr), place)
            if isinstance(node, ast.Call):
                self._report_call(node, names, own)

    def _report_call(self, node: ast.Call, names: dict[str, str], own: dict[str, str]) -> None:
        owner = ""
        if isinstance(node.func, ast.Attribute):
            owner, name = self._type(node.func.value, names, own), node.func.attr
            if not owner:
                return
        elif isinstance(node.func, ast.Name) and node.func.id in self._imported:
            name = node.func.id
        else:
            return
        call = Call(
            owner=owner,
            name=name,
            num_positional=len(node.args),
            keywords=tuple(sorted(k.arg for k in node.keywords if k.arg)),
            has_star=any(isinstance(a, ast.Starred) for a in node.args)
            or any(k.arg is None for k in node.keywords),
        )
        self._reads.calls.setdefault(call, f"{self._name}:{node.lineno}")


def _bindings(function: Function) -> Iterator[tuple[ast.expr, ast.expr, bool]]:
    """(target, value, target is an element of value) of everything that binds a name."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for one, value in zip(target.elts, node.value.elts, strict=False):
                    yield one, value, False
            else:
                yield target, node.value, False
        elif isinstance(node, ast.For | ast.comprehension):
            target, value = node.target, node.iter
            if isinstance(value, ast.Call) and ast.unparse(value.func) == "enumerate":
                target = target.elts[1] if isinstance(target, ast.Tuple) else target
                value = value.args[0]
            yield target, value, True
