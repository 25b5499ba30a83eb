// What torch asks of a CUDA device below Python, answered by a device that computes nothing: one card, streams and
// events without a queue. Loaded before a FakeTensorMode makes "cuda" tensors, it lets autograd run on them.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>

namespace {

using namespace c10;

const Device kCard(DeviceType::CUDA, 0);
thread_local StreamId current_stream = 0;
std::atomic<StreamId> streams_made{0};

struct FakeGuard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return kCard; }
  Device getDevice() const override { return kCard; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }

  Stream getStream(Device) const noexcept override { return stream(current_stream); }
  Stream getNewStream(Device, int) const override { return stream(++streams_made); }
  Stream exchangeStream(Stream next) const noexcept override {
    const Stream last = stream(current_stream);
    current_stream = next.id();
    return last;
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}

  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override {
    static int recorded;
    *event = &recorded;
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}

 private:
  static Stream stream(StreamId id) noexcept { return Stream(Stream::UNSAFE, kCard, id); }
};

FakeGuard guard;

}  // namespace

// To be called after torch is imported, since a CUDA build then registers a guard of its own.
extern "C" void register_fake_guard() {
  impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(&guard);
}

namespace at {

struct FakeCUDAHooks : CUDAHooksInterface {
  explicit FakeCUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  int getNumGPUs() const override { return 1; }
  bool isPinnedPtr(const void*) const override { return false; }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void deviceSynchronize(DeviceIndex) const override {}
};

// A CUDA build of torch has registered its own.
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, FakeCUDAHooks)

}  // namespace at
