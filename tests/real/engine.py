#!/usr/bin/env python3
"""A real SGLang engine on the CPU with a tiny random model: installs it, and runs it.

    engine.py setup FOLDER        installs the engine and makes the model; once, about 6 GB
    engine.py serve FOLDER PORT   runs the engine on loopback, until it is ended
    engine.py client FOLDER       installs the Python client of this tree, afresh each time

It is what `just real-engine` stands on. Needs Linux on x86-64 with glibc 2.34 or newer, Python 3.11,
and a pip that can fetch packages. Nothing is written outside FOLDER, and an engine that runs speaks
to loopback only.
"""

import fcntl
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
CLIENT = HERE.parents[1] / "clients/python"
VERSION = "0.5.15.post1"
# What the packages take; without that much room the installation is not begun.
ROOM_BYTES = 8 << 30
# KV slots in tokens: few, so that a session is a share of them that is seen.
POOL_TOKENS = 8192
INPUTS = ["requirements.txt", "constraints.txt", "tiny_model.py"]


def stamp():
    """Changes when anything does that the installation was made from."""
    digest = hashlib.sha256(VERSION.encode())
    for name in INPUTS:
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()


def run(*command, **options):
    print("+", *command, flush=True)
    subprocess.run([str(word) for word in command], check=True, **options)


def offline(**more):
    """The environment of an engine: no GPU, no model hub, and one thread, since two are slower."""
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **more,
    }


def setup(folder):
    if sys.version_info[:2] != (3, 11):
        sys.exit(f"Python 3.11 is needed, this is {sys.version.split()[0]}")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        complete = folder / "complete"
        if complete.exists() and complete.read_text() == stamp():
            return
        complete.unlink(missing_ok=True)
        for old in ("venv", "model"):
            shutil.rmtree(folder / old, ignore_errors=True)
        free = shutil.disk_usage(folder).free
        if free < ROOM_BYTES:
            sys.exit(f"{free >> 20} MiB are free below {folder}, {ROOM_BYTES >> 20} are needed")
        run(sys.executable, "-m", "venv", folder / "venv")
        python = folder / "venv/bin/python"
        # Without a cache: it would keep everything twice.
        pip = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-input"]
        run(*pip, "-r", HERE / "requirements.txt", "-c", HERE / "constraints.txt")
        # Its own list of packages names kernels for GPUs only.
        run(*pip, "--no-deps", f"sglang=={VERSION}")
        run(python, HERE / "tiny_model.py", folder / "model", env=offline())
        complete.write_text(stamp())


def serve(folder, port):
    python = folder / "venv/bin/python"
    flags = {
        "model-path": folder / "model",
        "served-model-name": "tiny",
        "device": "cpu",
        "host": "127.0.0.1",
        "port": port,
        "attention-backend": "torch_native",
        "sampling-backend": "pytorch",
        # A close frees KV in this version only with these two.
        "enable-session-radix-cache": None,
        "radix-eviction-policy": "priority",
        "enable-metrics": None,
        "max-total-tokens": POOL_TOKENS,
        "max-running-requests": 16,
        "context-length": POOL_TOKENS,
        "page-size": 1,
        "disable-overlap-schedule": None,
        "skip-server-warmup": None,
        "sleep-on-idle": None,
        "log-level-http": "warning",
    }
    command = [str(python), "-m", "sglang.launch_server"]
    for name, value in flags.items():
        command += [f"--{name}"] if value is None else [f"--{name}", str(value)]
    # It leaves files in the folder it is started in.
    os.chdir(folder)
    os.execve(python, command, offline(SGLANG_USE_CPU_ENGINE="1"))


def client(folder):
    """The client as a user has it: the package of this tree in an environment apart from the engine's."""
    run(sys.executable, "-m", "venv", "--clear", folder / "client")
    run(folder / "client/bin/python", "-m", "pip", "install", "--quiet", "--no-input", CLIENT)


def main():
    match sys.argv[1:]:
        case ["setup", folder]:
            setup(pathlib.Path(folder).resolve())
        case ["serve", folder, port]:
            serve(pathlib.Path(folder).resolve(), port)
        case ["client", folder]:
            client(pathlib.Path(folder).resolve())
        case _:
            sys.exit(__doc__)


main()
