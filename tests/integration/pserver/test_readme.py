import re
import subprocess
import sys
from pathlib import Path

import paddlewheel.pserver


def test_the_readme_runs(tmp_path):
    text = (Path(paddlewheel.pserver.__file__).parent / "README.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert "Client(" in code
    done = subprocess.run(
        [sys.executable, "-c", code.replace("/tmp", str(tmp_path))],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "lookup" / "default" / "values.npy").exists()
