// Any processor.
#include "portable.h"

namespace ecospec {
const Variant kBaseline = {"baseline", packed_bytes, pack, multiply, activate};
}
