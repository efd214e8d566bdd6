"""What all tests share: the harness that runs a test on several ranks."""

import os

# Without it MKL's products have, on some CPUs, bits that depend on where in memory their operands lie: the same numbers
# on two ranks, or in a bucket and alone, would differ in the last bit. It is read at the first product.
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")

pytest_plugins = ["vescale_testing.plugin"]
