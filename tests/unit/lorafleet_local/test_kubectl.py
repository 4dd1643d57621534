"""A kubectl that is too old for the API server is not used; failures carry kubectl's own words."""

import sys
from pathlib import Path

import pytest

from lorafleet_local.kubectl import Kubectl, KubectlError, find_kubectl


def own_kubectl(folder: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = folder / "kubectl"
    script.write_text(f"""#!/bin/sh
[ "$1" = version ] && {{ echo '{{"clientVersion": {{"gitVersion": "{version}"}}}}'; exit 0; }}
echo "$KUBECONFIG $*"; cat; echo "denied: $*" >&2; [ "$1" = get ]
""")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    find_kubectl.cache_clear()
    return script


@pytest.mark.parametrize("version", ["v1.36.0", "v1.37.1+k3s1"])
def test_the_users_own_kubectl_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    assert find_kubectl.__wrapped__ is not None
    script = own_kubectl(tmp_path, version, monkeypatch)
    assert find_kubectl.__wrapped__() == str(script)


@pytest.mark.parametrize("version", ["v1.32.4-dispatcher", "garbage"])
def test_an_old_or_broken_one_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    own_kubectl(tmp_path, version, monkeypatch)
    assert find_kubectl.__wrapped__() == str(Path(sys.executable).parent / "kubectl")


def test_output_input_and_kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_kubectl(tmp_path, "v1.37.0", monkeypatch)
    assert Kubectl(Path("/k"))("get", "pods", stdin="body\n") == "/k get pods\nbody\n"


def test_failure_carries_kubectls_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_kubectl(tmp_path, "v1.37.0", monkeypatch)
    with pytest.raises(KubectlError, match=r"kubectl apply -f x: exit 1: denied: apply -f x"):
        Kubectl(Path("/k"))("apply", "-f", "x")


def test_one_that_does_not_end_is_an_error_of_kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = own_kubectl(tmp_path, "v1.37.0", monkeypatch)
    kubectl = Kubectl(Path("/k"))
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(KubectlError, match=r"kubectl get pods: no end within 0\.2 s"):
        kubectl("get", "pods", timeout=0.2)
