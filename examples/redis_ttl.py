"""Print how long objects in the Redis of HICACHE_STORAGE_URL will live: `redis_ttl.py PREFIX`."""

import os
import sys

import redis


def main() -> None:
    url, prefix = os.environ["HICACHE_STORAGE_URL"], sys.argv[1]
    if "+cluster" in url:
        print("(the TTLs of a cluster are not shown)")
        return
    with redis.Redis.from_url(url.replace("redis+unix:", "unix:")) as client:
        lives = sorted(client.ttl(key) for key in client.scan_iter(f"{prefix}*", count=1000))
    print(f"{len(lives)} objects in Redis, to live for {lives[0]} to {lives[-1]} s more")


if __name__ == "__main__":
    main()
