"""What the import contracts of pyproject.toml cannot see: a lower package that starts a higher one as a program."""

from pathlib import Path

import pytest

import paddlewheel.data_pipeline
import paddlewheel.pserver
import paddlewheel.trainer


@pytest.mark.parametrize("package", [paddlewheel.data_pipeline, paddlewheel.pserver, paddlewheel.trainer])
def test_nothing_below_deploy_starts_the_command(package) -> None:
    sources = list(Path(package.__file__).parent.rglob("*.py"))
    assert len(sources) > 10
    assert not [path for path in sources if "paddlewheel.deploy" in path.read_text() or '"deploy' in path.read_text()]
