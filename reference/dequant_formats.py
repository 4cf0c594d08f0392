"""The packed formats by name. To learn a format, read its class; to add one, write a class and list it here.

A decoder is the shortest code that says what a format is. It returns weight [n, k] in the arithmetic of a rounding
contract: float64 holding the exact value for `exact`, float32 computed in the stated order for `f32`.
"""

from pagebench.reference.dequant_float import FP4_CODES, NF4_CODES, Bits4, Fp8, Mxfp4, Nvfp4, Nvfp4Swizzled
from pagebench.reference.dequant_gguf import Q4K, Q5K, Q6K, Q4One, Q4Zero, Q5Zero, Q8Zero
from pagebench.reference.dequant_integer import Awq, GptqV1, GptqV2, Int8, PackQuantized
from pagebench.reference.dequant_layout import PackedFormat
from pagebench.reference.dtypes import FLOAT8_E4M3FN, FLOAT8_E5M2

FORMATS: dict[str, PackedFormat] = {
    "fp8_e4m3": Fp8(FLOAT8_E4M3FN),
    "fp8_e5m2": Fp8(FLOAT8_E5M2),
    "int8": Int8(),
    "gptq_v1": GptqV1(),
    "gptq_v2": GptqV2(),
    "awq": Awq(),
    **{f"pack_quantized_{bits}": PackQuantized(bits) for bits in range(2, 9)},
    "mxfp4": Mxfp4(),
    "nvfp4": Nvfp4(),
    "nvfp4_ct": Nvfp4(divides=True),
    "nvfp4_swizzled": Nvfp4Swizzled(),
    "nf4": Bits4(NF4_CODES),
    "fp4": Bits4(FP4_CODES),
    "q4_0": Q4Zero(),
    "q4_1": Q4One(),
    "q5_0": Q5Zero(),
    "q8_0": Q8Zero(),
    "q4_k": Q4K(),
    "q5_k": Q5K(),
    "q6_k": Q6K(),
}
