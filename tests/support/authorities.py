"""Throw-away certificates for 127.0.0.1."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.needs import require

_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def make_authority(folder: Path, name: str) -> dict[str, str]:
    """An authority and a certificate signed by it: NAME.ca, NAME.cert, NAME.key; and the variables that name them."""
    names = folder / "names"
    names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    ca, ca_key, key, request, cert = (folder / f"{name}.{end}" for end in ("ca", "cakey", "key", "csr", "cert"))
    _openssl("req", "-x509", *_CURVE, "-keyout", ca_key, "-out", ca, "-days", 2, "-subj", f"/CN={name}")
    _openssl("req", *_CURVE, "-keyout", key, "-out", request, "-subj", "/CN=role")
    signing = ("x509", "-req", "-in", request, "-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-days", 2)
    _openssl(*signing, "-out", cert, "-extfile", names)
    return {"PADDLEWHEEL_TLS_CA": str(ca), "PADDLEWHEEL_TLS_CERT": str(cert), "PADDLEWHEEL_TLS_KEY": str(key)}


def _openssl(*words: object) -> None:
    require("openssl")
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)
