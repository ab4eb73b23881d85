import importlib.metadata

import pytest

from paddlewheel.pserver import paddle_core, requirements
from paddlewheel.pserver.errors import RequirementError


@pytest.fixture
def installed(monkeypatch):
    versions = {"protobuf": "6.33.6", "paddlepaddle": "2.6.2"}

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    return versions


def test_the_right_versions_pass(installed):
    assert requirements.check(import_core=False) == "paddlepaddle 2.6.2"
    installed["paddlepaddle-gpu"] = installed.pop("paddlepaddle") + ".post118"
    assert requirements.check(import_core=False) == "paddlepaddle-gpu 2.6.2.post118"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"protobuf": "7.0.0"}, "protobuf 7.0.0.*pip install 'protobuf"),
        ({"protobuf": None}, "protobuf None"),
        ({"paddlepaddle": "3.3.1"}, "3.3.1 is installed; 2.6.2 is needed.*pip install paddlepaddle==2.6.2"),
        ({"paddlepaddle": "2.6.20"}, "2.6.20 is installed"),
        ({"paddlepaddle": None}, "not installed: pip install"),
        ({"paddlepaddle-gpu": "2.6.2"}, "both paddlepaddle and paddlepaddle-gpu"),
    ],
)
def test_everything_else_is_refused_with_the_remedy(installed, change, words):
    for name, version in change.items():
        if version is None:
            del installed[name]
        else:
            installed[name] = version
    with pytest.raises(RequirementError, match=words):
        requirements.check(import_core=False)


def test_a_build_without_servers_is_refused(installed, monkeypatch):
    monkeypatch.setattr(paddle_core, "load", lambda: (object(), None))
    with pytest.raises(RequirementError, match="without the parameter server"):
        requirements.check()


def test_a_core_that_cannot_be_loaded_is_refused_with_its_first_error(installed, monkeypatch):
    def fail():
        raise ImportError("libgomp.so.1: cannot open shared object file")

    monkeypatch.setattr(paddle_core, "load", fail)
    with pytest.raises(RequirementError, match=r"libgomp\.so\.1: cannot open .*pip install --force-reinstall"):
        requirements.check()
