"""Pipeline stages on a CPU with vLLM 0.32: `--worker-cls cpu_pipeline_worker.Worker`.

Every stage but the first receives the activations of the one before it in buffers that vLLM makes
in its warm-up. The CPU worker skips the warm-up with --enforce-eager, which the CPU needs, and the
first request of such a stage fails. GPUs need nothing of this.
"""

from vllm.v1.worker.cpu_worker import CPUWorker


class Worker(CPUWorker):
    def load_model(self, *args, **kwargs) -> None:
        """Make the buffers that the warm-up would have made."""
        super().load_model(*args, **kwargs)
        runner = self.model_runner
        if runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=runner.device,
            )
