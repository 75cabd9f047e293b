"""An engine's host with more of SGLang's arguments, a JSON object in MORE: SGLang's own deterministic modes beside ours."""

import json
import os

from miles_hpc.rollout import sglang

MORE = "BENCH_SGLANG_ARGUMENTS"
_usual = sglang.server_arguments
sglang.server_arguments = lambda a, gpus: _usual(a, gpus) | json.loads(os.environ[MORE])

if __name__ == "__main__":
    sglang.main()
