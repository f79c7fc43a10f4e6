#include "sampler/sampler_scan_body.h"

namespace engine {

const ScanKernels& scan_kernels_avx2() {
    return kScanKernels;
}

}  // namespace engine
