// Registers CUDA and XPU devices that are not there with a CPU build of torch: hooks, and guards whose streams and events
// do nothing. FakeTensorMode needs no more to run a program on them: tensors have a device and a shape, and no elements.
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/XPUHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <cstring>

namespace {

// Whether the environment names this kind of device: a process sees one.
bool there(const char* kind) {
  const char* named = std::getenv("ABSENT_DEVICE");
  return named != nullptr && std::strcmp(named, kind) == 0;
}

struct CudaHooks : at::CUDAHooksInterface {
  explicit CudaHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return there("cuda"); }
  bool isAvailable() const override { return there("cuda"); }
  bool hasCUDA() const override { return there("cuda"); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void*) const override { return false; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

struct XpuHooks : at::XPUHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return there("xpu"); }
  bool isAvailable() const override { return there("xpu"); }
  bool hasXPU() const override { return there("xpu"); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

template <c10::DeviceType kind>
struct Guard : c10::impl::NoOpDeviceGuardImpl<kind> {
  static c10::Device only() { return {kind, 0}; }
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, only()); }
  c10::Device getDevice() const override { return only(); }
  c10::Device exchangeDevice(c10::Device) const override { return only(); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream other) const noexcept override { return other; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override { *event = this_event(); }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  static void* this_event() {
    static char event;
    return &event;
  }
};

Guard<c10::DeviceType::CUDA> cuda;
Guard<c10::DeviceType::XPU> xpu;
const bool registered = [] {
  c10::impl::registerDeviceGuard(c10::DeviceType::CUDA, &cuda);
  c10::impl::registerDeviceGuard(c10::DeviceType::XPU, &xpu);
  return true;
}();

}  // namespace

namespace at {
using CUDAHooks = ::CudaHooks;
using XPUHooks = ::XpuHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
REGISTER_XPU_HOOKS(XPUHooks)
}  // namespace at
