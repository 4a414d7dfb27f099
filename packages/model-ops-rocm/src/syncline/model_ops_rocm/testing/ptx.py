"""What compiled PTX says of descriptors of tiles: which are read, and which are fetched ahead."""

import re


def parameters_of_descriptors(ptx: str) -> set[str]:
    """Names of the kernel's parameters that are as large as a descriptor, and lie as one does."""
    return set(re.findall(r"\.param \.align 64 \.b8 (\w+)\[128\]", ptx))


def descriptors_read(ptx: str) -> set[str]:
    """Names of the parameters by which tiles are copied to shared memory."""
    names = dict(re.findall(r"mov\.b64\s+(%rd\d+), (\w+_param_\d+);", ptx))
    generic = dict(re.findall(r"cvta\.param\.u64\s+(%rd\d+), (%rd\d+);", ptx))
    read = re.findall(r"cp\.async\.bulk\.tensor\.\S+ \[%r\d+\], \[(%rd\d+),", ptx)
    return {names[generic[register]] for register in read}


def descriptors_fetched(ptx: str) -> list[tuple[str, str]]:
    """(name of the parameter, instruction) of what is asked for ahead, in the order of the text."""
    pattern = r"mov\.b64 at, (\w+);\s+cvta\.param\.u64 at, at;\s+@\w+ ([\w.:]+)"
    return re.findall(pattern, ptx)
