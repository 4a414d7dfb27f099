"""There is a GPU for the marked tests to run on; prints which, or says why not and exits 1."""

import sys

import torch


def main() -> None:
    """A session of GPU tests that skipped them all would be green for nothing."""
    if not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} sees no GPU: the marked tests cannot run here")
    properties = torch.cuda.get_device_properties(0)
    platform = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    print(f"{torch.cuda.device_count()} x {properties.name}, {platform}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
