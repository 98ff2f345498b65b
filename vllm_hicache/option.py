"""What is said of one option of the connector."""

from dataclasses import dataclass

from vllm_hicache.option_kinds import Kind

ENV_PREFIX = "HICACHE_"
STORAGE = "storage"


@dataclass(frozen=True, slots=True)
class Option:
    """One option.

    name      key; ``storage.x`` is key ``x`` of the table ``storage``
    kind      how values are read and shown
    default   parsed value when nothing is given
    example   a value as written in YAML or JSON
    doc       one line of meaning
    needs     options without which it has no effect: ``name`` (set) or ``name=value|value``;
              for a URL the value is its scheme
    nullable  null may be given and means the default
    schemes   defaults that differ from ``default``, each with the scheme of the URL
    """

    name: str
    kind: Kind
    default: object
    example: object
    doc: str
    needs: tuple[str, ...] = ()
    nullable: bool = False
    schemes: tuple[tuple[str, object], ...] = ()

    @property
    def env_name(self) -> str:
        return ENV_PREFIX + self.name.replace(".", "_").upper()

    @property
    def field(self) -> str:
        """Name of the attribute that holds the value; sizes carry their unit there."""
        bare = self.name.rpartition(".")[2]
        is_suffixed = self.kind.name != "size" or bare.endswith("_bytes")
        return bare if is_suffixed else bare + "_bytes"
