"""Our connector against the interfaces of both vLLM releases: the installed one and 0.33.

``surface_033.json`` was written by ``extract_surface.py`` from the source of vLLM 0.33.0; the
installed release is read by the same script when the tests run.
"""

import importlib.util
import inspect
import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

HERE = Path(__file__).parent
CONNECTORS = sorted(HERE.parents[1].joinpath("connectors").glob("*.py"))
RELEASES = ("installed", "0.33")

# Hooks that only the newer release has; overriding them is no use, and no harm, in the older one.
NEWER_HOOKS = {"supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"}

# Classes of which vLLM knows nothing but the name; their members are ours.
MARKERS = {"KVConnectorHandshakeMetadata", "KVConnectorMetadata", "KVConnectorWorkerMetadata"}

# What connectors/ reads of vLLM at the least. The search finds more; that it finds these shows
# that it follows our annotations.
USED_NAMES = {
    "BlockPool": ("blocks", "free_block_queue", "free_blocks", "touch", "unpin_blocks"),
    "CachedRequestData": ("new_block_ids", "req_ids", "resumed_req_ids"),
    "ChunkedLocalAttentionSpec": ("attention_chunk_size",),
    "FreeKVCacheBlockQueue": ("fake_free_list_head", "fake_free_list_tail"),
    "FullAttentionSpec": ("block_size", "dtype", "head_size", "head_size_v", "num_kv_heads"),
    "KVCacheBlock": ("block_id", "next_free_block"),
    "KVCacheConfig": (
        "kv_cache_groups",
        "kv_cache_layout",
        "kv_cache_tensors",
        "num_blocks",
        "prefix_cacheable_group_ids",
    ),
    "KVCacheGroupSpec": ("kv_cache_spec", "layer_names"),
    "KVCacheManager": ("block_pool", "get_blocks"),
    "KVCacheSpec": ("block_size", "state_content_size_bytes"),
    "KVCacheTensor": ("block_stride", "layer_stride", "layers", "offset"),
    "KVConnectorBlockState": ("boundary_state_offloads",),
    "KVConnectorOutput": ("kv_connector_worker_meta",),
    "MLAAttentionSpec": ("cache_role", "model_version"),
    "MambaSpec": ("mamba_cache_mode", "mamba_type", "tp_replicated"),
    "NewRequestData": ("block_ids", "req_id"),
    "Request": ("all_token_ids", "cache_salt", "lora_request", "mm_features", "request_id"),
    "SchedulerOutput": ("num_scheduled_tokens", "scheduled_cached_reqs", "scheduled_new_reqs"),
    "SlidingWindowSpec": ("extra_retained_tokens", "sliding_window"),
    "SpeculativeConfig": ("method", "use_eagle_block_drop", "use_gemma4_mtp"),
    "UniformTypeKVCacheSpecs": ("kv_cache_specs",),
    "VllmConfig": (
        "cache_config",
        "kv_transfer_config",
        "max_concurrent_batches",
        "model_config",
        "parallel_config",
    ),
}


def _load(name):
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


extract_surface = _load("extract_surface")
find_reads = _load("find_reads")


@pytest.fixture(scope="module")
def surfaces():
    package = Path(importlib.util.find_spec("vllm").origin).parent
    return {
        "installed": json.loads(extract_surface.render(extract_surface.extract(package))),
        "0.33": json.loads((HERE / "surface_033.json").read_text()),
    }


@pytest.fixture(scope="module")
def reads(surfaces):
    known = frozenset(surfaces["installed"]["classes"]) - MARKERS
    return find_reads.find_reads(CONNECTORS, known)


@pytest.fixture(scope="module")
def connector():
    from vllm_hicache.connectors.hicache import HiCacheConnector

    return HiCacheConnector


def _members(surface, name):
    described = surface["classes"].get(name)
    if described is None:
        return set()
    members = {*described["attributes"], *described["methods"]}
    return members.union(*(_members(surface, base) for base in described["bases"]))


def _method(surface, owner, name):
    """The row of a method, looked up through the base classes; None for anything else."""
    described = surface["classes"].get(owner, {"methods": {}, "bases": []})
    if name in described["methods"]:
        return described["methods"][name]
    found = (_method(surface, base, name) for base in described["bases"])
    return next((row for row in found if row), None)


def _kind(value):
    for cls in (property, classmethod, staticmethod):
        if isinstance(value, cls):
            return cls.__name__
    return "method" if inspect.isfunction(value) else "attribute"


def _own_hooks(connector):
    """Public members of our classes, by name, that stand for something of vLLM's or are new."""
    hooks = {}
    for cls in reversed(connector.__mro__):
        if cls.__module__.startswith("vllm_hicache."):
            hooks.update({k: v for k, v in vars(cls).items() if not k.startswith("_")})
    return hooks


def _our_rows(function, kind):
    """Parameters of our function in the rows that the extractor writes."""
    kinds = {
        inspect.Parameter.POSITIONAL_ONLY: "positional",
        inspect.Parameter.POSITIONAL_OR_KEYWORD: "positional",
        inspect.Parameter.VAR_POSITIONAL: "var_positional",
        inspect.Parameter.KEYWORD_ONLY: "keyword",
        inspect.Parameter.VAR_KEYWORD: "var_keyword",
    }
    parameters = list(inspect.signature(function).parameters.values())
    if kind != "staticmethod":
        parameters = parameters[1:]
    empty = inspect.Parameter.empty
    return [[p.name, kinds[p.kind], p.default is not empty] for p in parameters]


def _difference(theirs, ours):
    """Why a call that their parameters allow could fail with ours; empty if none can."""
    names = {kind: [n for n, k, _ in ours if k == kind] for kind in ("positional", "keyword")}
    has = {kind for _, kind, _ in ours}
    problems = []
    position = 0
    for name, kind, has_default in theirs:
        if kind in {"var_positional", "var_keyword"}:
            if kind not in has:
                problems.append(f"{kind} parameter {name} is missing")
            continue
        mine = next((row for row in ours if row[0] == name), None)
        if mine is None:
            problems.append(f"parameter {name} is missing")
        elif kind == "positional" and names["positional"][position : position + 1] != [name]:
            problems.append(f"parameter {name} is not number {position + 1}")
        elif has_default and not mine[2]:
            problems.append(f"parameter {name} lost its default")
        position += kind == "positional"
    known = {name for name, _, _ in theirs}
    for name, kind, has_default in ours:
        if name not in known and not has_default and not kind.startswith("var_"):
            problems.append(f"parameter {name} is unknown to vLLM and has no default")
    return problems


def _binds(rows, call):
    """True if the call's positional and keyword arguments fit the parameters."""
    if call.has_star:
        return True
    positional = [row for row in rows if row[1] == "positional"]
    has = {row[1] for row in rows}
    if call.num_positional > len(positional) and "var_positional" not in has:
        return False
    by_position = {row[0] for row in positional[: call.num_positional]}
    allowed = {row[0] for row in rows} - by_position
    if not set(call.keywords) <= allowed and "var_keyword" not in has:
        return False
    required = {name for name, kind, default in rows if not default and "var" not in kind}
    return required <= by_position | set(call.keywords)


def test_recorded_surface_is_that_of_033_and_knows_every_class(surfaces):
    assert surfaces["0.33"]["release"] == "0.33.0"
    assert surfaces["installed"]["release"].startswith(("0.32", "0.33"))
    wanted = {name for names in extract_surface.CLASSES.values() for name in names}
    for surface in surfaces.values():
        assert set(surface["classes"]) == wanted
        assert set(surface["functions"]) == extract_surface.FUNCTIONS
        assert all(surface["modules"].values())


def test_newer_release_has_three_more_hooks(surfaces):
    hooks = [set(surfaces[r]["classes"]["KVConnectorBase_V1"]["methods"]) for r in RELEASES]
    if surfaces["installed"]["release"].startswith("0.32"):
        assert hooks[1] - hooks[0] == NEWER_HOOKS
    assert hooks[0] <= hooks[1]


@pytest.mark.parametrize("release", RELEASES)
def test_every_public_member_of_our_connector_fits_the_release(surfaces, connector, release):
    surface = surfaces[release]
    bases = ("KVConnectorBase_V1", "SupportsHMA")
    known = set().union(*(_members(surface, base) for base in bases))
    overridden = 0
    for name, value in _own_hooks(connector).items():
        if name not in known:
            continue
        kind = _kind(value)
        row = next(filter(None, (_method(surface, base, name) for base in bases)), None)
        if row is None:
            assert kind in {"property", "attribute"}, f"{name} is no method in vLLM {release}"
        else:
            assert kind == row["kind"], name
            function = getattr(value, "__func__", value)
            problems = _difference(row["parameters"], _our_rows(function, kind))
            assert not problems, f"{name} in vLLM {release}: {problems}"
        overridden += 1
    assert overridden > 15


def test_no_public_method_of_our_connector_is_a_hook_that_vllm_never_calls(surfaces, connector):
    """A misspelt or removed hook would be silently dead."""
    known = set().union(
        *(
            _members(surface, base)
            for surface in surfaces.values()
            for base in ("KVConnectorBase_V1", "SupportsHMA")
        )
    )
    for name, value in _own_hooks(connector).items():
        if _kind(value) in {"method", "classmethod", "staticmethod"}:
            assert name in known, f"vLLM has no hook {name}"


def test_hook_that_one_release_lacks_is_one_of_the_newer_hooks(surfaces, connector):
    for name, value in _own_hooks(connector).items():
        present = [
            any(_method(surfaces[r], base, name) for base in ("KVConnectorBase_V1", "SupportsHMA"))
            for r in RELEASES
        ]
        if _kind(value) in {"method", "classmethod"} and not all(present):
            assert name in NEWER_HOOKS


@pytest.mark.parametrize("release", RELEASES)
def test_every_abstract_hook_is_implemented(surfaces, connector, release):
    for base in ("KVConnectorBase_V1", "SupportsHMA"):
        abstract = surfaces[release]["classes"][base]["abstract"]
        assert abstract
        for name in abstract:
            assert not getattr(getattr(connector, name), "__isabstractmethod__", False), name


@pytest.mark.parametrize("release", RELEASES)
def test_constructor_takes_what_vllm_passes(surfaces, connector, release):
    row = surfaces[release]["classes"]["KVConnectorBase_V1"]["methods"]["__init__"]
    assert not _difference(row["parameters"], _our_rows(connector.__init__, "method"))


@pytest.mark.parametrize("release", RELEASES)
def test_every_name_that_we_import_from_vllm_exists(surfaces, reads, release):
    modules = surfaces[release]["modules"]
    assert len(reads.imports) > 20
    for (module, name), place in reads.imports.items():
        assert module in modules, f"{place}: list {module} in extract_surface.py and run it again"
        assert name in modules[module], f"{place}: vLLM {release} has no {module}.{name}"


@pytest.mark.parametrize("release", RELEASES)
def test_every_member_that_we_read_of_vllm_exists(surfaces, reads, release):
    for (owner, name), place in reads.members.items():
        if not owner.startswith("["):
            members = _members(surfaces[release], owner)
            assert name in members, f"{place}: vLLM {release} has no {owner}.{name}"
    for owner, names in USED_NAMES.items():
        assert set(names) <= _members(surfaces[release], owner)


@pytest.mark.parametrize("owner", sorted(USED_NAMES))
def test_search_for_reads_finds_what_is_known_to_be_used(reads, owner):
    found = {name for cls, name in reads.members if cls == owner}
    assert set(USED_NAMES[owner]) <= found


@pytest.mark.parametrize("release", RELEASES)
def test_every_call_of_vllm_fits_its_parameters(surfaces, reads, release):
    surface = surfaces[release]
    checked = 0
    for call, place in reads.calls.items():
        row = (
            _method(surface, call.owner, call.name)
            if call.owner
            else surface["functions"].get(call.name) or _method(surface, call.name, "__init__")
        )
        if row is not None:
            assert _binds(row["parameters"], call), f"{place}: {call} in vLLM {release}"
            checked += 1
        elif call.name in surface["classes"]:
            # A dataclass or msgspec struct: its fields are its parameters.
            missing = set(call.keywords) - _members(surface, call.name)
            assert not missing, f"{place}: {call.name} has no {missing} in vLLM {release}"
            checked += 1
        else:
            assert call.owner, f"{place}: list {call.name} in extract_surface.FUNCTIONS"
    assert checked > 10


def test_difference_of_signatures_names_each_way_to_break_a_call():
    theirs = [["a", "positional", False], ["b", "positional", True], ["kw", "var_keyword", True]]
    same = [["a", "positional", False], ["b", "positional", True], ["more", "var_keyword", True]]
    assert _difference(theirs, same) == []
    assert _difference(theirs, [*same[:2], ["c", "positional", True], same[2]]) == []
    assert "var_keyword" in _difference(theirs, same[:2])[0]
    assert "a is missing" in _difference(theirs, same[1:])[0]
    assert (
        "b lost its default"
        in _difference(theirs, [same[0], ["b", "positional", False], same[2]])[0]
    )
    assert "a is not number 1" in _difference(theirs, [same[1], same[0], same[2]])[0]
    assert "c is unknown" in _difference(theirs, [*same, ["c", "keyword", False]])[0]


def test_search_for_reads_follows_annotations_assignments_and_loops(tmp_path):
    file = tmp_path / "sample.py"
    file.write_text(
        "from vllm.v1.request import Request\n"
        "class Side:\n"
        "    def __init__(self, vllm_config: 'VllmConfig | None') -> None:\n"
        "        self._config = vllm_config\n"
        "    def use(self, request: Request, other: int) -> None:\n"
        "        model = self._config.model_config\n"
        "        model.gone(1, *other.x, key=2)\n"
        "        return [f.mm_position.offset for f in request.mm_features or ()]\n"
    )
    known = frozenset({"VllmConfig", "Request", "ModelConfig"})
    reads = find_reads.find_reads([file], known)
    assert set(reads.members) == {
        ("VllmConfig", "model_config"),
        ("ModelConfig", "gone"),
        ("Request", "mm_features"),
        ("MultiModalFeatureSpec", "mm_position"),
        ("PlaceholderRange", "offset"),
    }
    assert set(reads.imports) == {("vllm.v1.request", "Request")}
    (call,) = reads.calls
    assert (call.owner, call.name, call.keywords, call.has_star) == (
        "ModelConfig",
        "gone",
        ("key",),
        True,
    )
