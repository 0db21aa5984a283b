"""Runs in an environment with vLLM: loads the checkpoints that a JSON file lists, one after the other, in one process.

    python tests/support/vllm_jobs.py jobs.json answers.json

An answer has the greedy tokens after each prompt, log-probabilities of the prompts' own tokens, and the bytes of the
linear layers; or an error.
"""

import gc
import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # to look into the model


def linear_bytes(model) -> dict[str, int]:
    """The bytes of the linear layers' Parameters by their names."""
    found: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        if "_proj" in name or ".c_" in name:
            last = name.rpartition(".")[2]
            found[last] = found.get(last, 0) + parameter.nbytes
    return found


def answer(directory: str, prompts: list[list[int]], new: int, **settings) -> dict:
    from vllm import LLM, SamplingParams

    llm = LLM(directory, **{"dtype": "float32", "enforce_eager": True, "max_model_len": 256} | settings)
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, prompt_logprobs=1, detokenize=False)
    found: dict = {"tokens": [], "logprobs": [], "bytes": llm.apply_model(linear_bytes)[0]}
    for ids in prompts:  # int8 kernels round by the number of tokens, so one by one
        output = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)[0]
        found["tokens"].append(list(output.outputs[0].token_ids))
        found["logprobs"].append([each[token].logprob for each, token in zip(output.prompt_logprobs[1:], ids[1:])])
    llm.llm_engine.engine_core.shutdown()
    return found


def main() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    with open(sys.argv[1]) as file:
        jobs = json.load(file)
    answers = {}
    for name, job in jobs.items():
        try:
            answers[name] = answer(**job)
        except Exception as error:
            answers[name] = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()
        cleanup_dist_env_and_memory()
        with open(sys.argv[2], "w") as file:
            json.dump(answers, file)


if __name__ == "__main__":
    main()
