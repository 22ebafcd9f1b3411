"""A worker of vLLM whose steps take the time of a formula, as on an accelerator: the processor is free meanwhile.

The tiny model is computed all the same. STEP has the seconds of a step, a computed token, a pair of tokens that attention reads, and a
request that decodes: the terms of the simulated engine.
"""
import json
import os
import time

from vllm.v1.worker.cpu_worker import CPUWorker


class TimedWorker(CPUWorker):
    base, token, pair, decode = json.loads(os.environ.get("STEP", "[0, 0, 0, 0]"))
    until = 0.0

    def execute_model(self, step):
        if step.total_num_scheduled_tokens:
            start = {r.req_id: r.num_computed_tokens for r in step.scheduled_new_reqs}
            start.update(zip(step.scheduled_cached_reqs.req_ids, step.scheduled_cached_reqs.num_computed_tokens))
            took = self.base
            for request, n in step.num_scheduled_tokens.items():
                took += self.decode if n == 1 else self.token * n + self.pair * n * (start[request] + n / 2)
            self.until = time.monotonic() + took
        return super().execute_model(step)

    def sample_tokens(self, grammar):
        sampled = super().sample_tokens(grammar)
        time.sleep(max(0, self.until - time.monotonic()))
        return sampled
