"""A distribution as pip leaves it, so that `importlib.metadata` finds it; knows no module."""

from pathlib import Path


def write_distribution(folder: Path, name: str, version: str) -> None:
    """Its `dist-info` in a folder of `sys.path`."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (info / "METADATA").write_text(text)
