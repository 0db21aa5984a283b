"""Runs in an environment with vLLM: a server answers the `openai` client one by one, at once, and while requests are
cancelled.

    python tests/support/openai_requests.py http://127.0.0.1:8000
"""

import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai

PROMPTS = ["The capital of France is", "def fib(n):", "Water boils at", "Once upon a time", "1, 2, 3,", "To be or"]


def main(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)
    (model,) = client.models.list().data

    def complete(prompt: str, new: int = 12) -> str:
        answer = client.completions.create(model=model.id, prompt=prompt, max_tokens=new, temperature=0)
        return answer.choices[0].text

    def cancel(prompt: str) -> None:
        stream = client.completions.create(model=model.id, prompt=prompt, max_tokens=200, temperature=0, stream=True)
        next(iter(stream))
        stream.close()

    alone = [complete(prompt) for prompt in PROMPTS]
    assert all(alone), alone
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(complete, PROMPTS)) == alone
        cancelled = [pool.submit(cancel, prompt) for prompt in PROMPTS]
        assert complete(PROMPTS[0]) == alone[0]
        for each in cancelled:
            each.result()
    assert [complete(prompt) for prompt in PROMPTS] == alone
    chat = client.chat.completions.create(model=model.id, messages=[{"role": "user", "content": "Hi"}], max_tokens=4)
    assert chat.choices[0].finish_reason == "length"
    end = time.monotonic() + 60
    while (running := requests_running(url)) and time.monotonic() < end:
        time.sleep(0.5)
    assert running == 0, running
    print("answered")


def requests_running(url: str) -> float:
    lines = urllib.request.urlopen(f"{url}/metrics").read().decode().splitlines()
    (value,) = (line.rsplit(" ", 1)[1] for line in lines if line.startswith("vllm:num_requests_running{"))
    return float(value)


if __name__ == "__main__":
    main(sys.argv[1])
