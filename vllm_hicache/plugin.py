"""vLLM's entry point: makes the connector known by its name in every process of an engine."""


def register() -> None:
    """Register ``HiCacheConnector``. Cheap, without I/O, and may be called again."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "HiCacheConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "HiCacheConnector", "vllm_hicache.connectors.hicache", "HiCacheConnector"
        )
