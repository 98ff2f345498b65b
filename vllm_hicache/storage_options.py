"""Options of the table ``storage``: how a storage is reached, and what it may cost."""

from vllm_hicache import option_kinds as kinds
from vllm_hicache.option import Option
from vllm_hicache.quantities import GIB, MIB

_URL = ("storage.url",)
_FOLDER = ("storage.url=file|plugin",)
_S3 = ("storage.url=s3|plugin",)
_REDIS = ("storage.url=redis|rediss|redis+unix|unix|redis+cluster|rediss+cluster|plugin",)

STORAGE_TABLE = (
    Option(
        "storage.url",
        kinds.storage_url(),
        None,
        "file:///var/cache/hicache",
        "where pages are stored; its scheme names the backend",
    ),
    Option(
        "storage.capacity",
        kinds.size(),
        None,
        "500GB",
        "bytes of all objects in the folder, over all engines that share it; unset, what the "
        "file system holds less min_free",
        _FOLDER,
        nullable=True,
    ),
    Option(
        "storage.min_free",
        kinds.size(zero=True),
        GIB,
        "10GiB",
        "bytes of the file system that are left free for others",
        _FOLDER,
    ),
    Option(
        "storage.part_size",
        kinds.size(),
        16 * MIB,
        "32MiB",
        "larger objects are written in parts and read by ranges of this size; S3 refuses parts "
        "below 5 MiB",
        _S3,
    ),
    Option(
        "storage.encryption",
        kinds.choice("AES256", "aws:kms", "aws:kms:dsse"),
        None,
        "aws:kms",
        "how S3 encrypts objects at rest; unset, as the bucket says",
        _S3,
        nullable=True,
    ),
    Option(
        "storage.kms_key",
        kinds.label(),
        None,
        "alias/hicache",
        "key of AWS KMS for the encryption of objects; unset, the default one",
        _S3,
        nullable=True,
    ),
    Option(
        "storage.key_prefix",
        kinds.label(),
        "hicache:",
        "team-a:",
        "what the keys of all objects in Redis begin with, equal for all engines that share them",
        _REDIS,
    ),
    Option(
        "storage.ttl_s",
        kinds.lifetime(),
        None,
        "7d",
        "an object goes when it was neither read nor written again for so long; unset, only when "
        "the server needs room",
        _REDIS,
        nullable=True,
    ),
    Option(
        "storage.username",
        kinds.label(),
        None,
        "hicache",
        "ACL user, where the URL names none; unset, the default user",
        _REDIS,
        nullable=True,
    ),
    Option(
        "storage.password",
        kinds.secret(1, 512),
        None,
        "of the user",
        "password of the user, where the URL has none",
        _REDIS,
        nullable=True,
    ),
    Option(
        "storage.ca_file",
        kinds.absolute_path(),
        None,
        "/etc/ssl/redis-ca.pem",
        "PEM file of the authorities that may sign the server's certificate; unset, those of the "
        "system",
        _REDIS,
        nullable=True,
    ),
    Option(
        "storage.read_concurrency",
        kinds.whole(1, 1024),
        16,
        32,
        "objects that one worker reads at the same time",
        _URL,
    ),
    Option(
        "storage.write_concurrency",
        kinds.whole(1, 1024),
        8,
        4,
        "objects that one worker writes at the same time",
        _URL,
    ),
    Option(
        "storage.operation_timeout_s",
        kinds.duration(),
        10.0,
        10.0,
        "longest time for a fetch or persist before it is given up",
        _URL,
    ),
    Option(
        "storage.connect_timeout_s",
        kinds.duration(),
        5.0,
        "2s",
        "longest time to open the backend or a connection to it",
        _URL,
    ),
    Option(
        "storage.exists_timeout_s",
        kinds.duration(),
        0.05,
        "50ms",
        "longest time to ask which pages are stored; later answers count as none; 0.5 with s3://",
        _URL,
        schemes=(("s3", 0.5),),
    ),
    Option(
        "storage.write_backlog",
        kinds.size(),
        GIB,
        "2GiB",
        "bytes of one worker that may wait to be written; beyond it pages are not stored",
        _URL,
    ),
    Option(
        "storage.shutdown_grace_s",
        kinds.duration(0.0),
        5.0,
        "5s",
        "time to write what is queued after the engine has stopped",
        _URL,
    ),
    Option(
        "storage.integrity_key",
        kinds.secret(),
        None,
        "any 16 or more characters",
        "key of the checksums of stored objects: who lacks it cannot forge one; equal for all "
        "engines that share the storage",
        _URL,
        nullable=True,
    ),
)
