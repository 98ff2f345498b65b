"""`python examples/cpu_server.py --model NAME [options]`: vllm serve, on a CPU with few cores.

The command of the CPU wheel cannot start. vLLM's processes import the script that started them, and
so all have what this one imports.
"""

import cpu_queues  # noqa: F401 (for what importing it does)

if __name__ == "__main__":
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
