// x86-64 with AVX2 and FMA.
#include "portable.h"

namespace ecospec {
const Variant kAvx2 = {"avx2", packed_bytes, pack, multiply, activate};
}
