"""A whole engine in one thread: the real planner among virtual workers, storage and requests.

``python -m vllm_hicache.simulate.faults`` runs stories with faults and checks every promise.
"""
