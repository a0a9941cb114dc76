// A stand-in for CUDA devices in a torch that was built for the CPU alone.
//
// A tensor on "cuda:k" holds memory of the CPU, and its operations run the CPU's kernels. What a mistake with devices
// would break on a GPU breaks here: tensors of two devices in one operation, layouts that differ between devices, a
// wait between streams that is missing, memory that is used up, a label out of range. torch finds all of it under its
// own names: hooks, guard, allocator, kernels.
//
// Sections: errors, streams, order of work on streams, memory, guard, generators, hooks, reads by the host, calls,
// operators of their own, C functions.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>
#include <unordered_map>

namespace {
using namespace at;
using torch::jit::Stack;

constexpr DeviceType GPU = DeviceType::CUDA;
constexpr int MOST = 16;  // devices
constexpr int64_t BLOCK = 2 << 20;  // bytes by which a device reserves memory

int64_t number_from(const char* variable, int64_t otherwise) {
  const char* text = std::getenv(variable);
  return text && *text ? std::atoll(text) : otherwise;
}

const DeviceIndex COUNT =
    static_cast<DeviceIndex>(std::clamp<int64_t>(number_from("ROUNDELAY_STANDIN_DEVICES", 2), 1, MOST));
const int64_t CAPACITY = number_from("ROUNDELAY_STANDIN_MEMORY", 16LL << 30);  // bytes of each device

thread_local DeviceIndex current = 0;

DeviceIndex resolved(DeviceIndex index) { return index < 0 ? current : index; }
Device device_of(DeviceIndex index) { return Device(GPU, resolved(index)); }

// ---------------------------------------------------------------------------------------------------------- errors

std::atomic<bool> asserted{false};  // a kernel has failed an assertion: CUDA answers every later call so

[[noreturn]] void fail_assertion() {
  asserted = true;
  const std::string text =
      "CUDA error: device-side assert triggered\n"
      "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
      "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
      "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n";
  throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, 710, text);
}

/// Every call of the device begins with it.
void check_alive() {
  if (asserted) fail_assertion();
}

// ---------------------------------------------------------------------------------------------- streams and events

// Work is done when it is given, but a stream may be made to seem busy (`standin_sleep`): until then its events are not
// passed, and whoever waits for them waits.
using Key = std::pair<DeviceIndex, StreamId>;

thread_local StreamId chosen[MOST] = {};  // by device, the thread's current stream
std::atomic<StreamId> num_streams{0};

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void wait_until(double time_ms) {
  const double left = time_ms - now_ms();
  if (left > 0) std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(left));
}

struct Streams {
  std::map<Key, double> busy_until_ms;
  std::mutex lock;

  double ready_ms(Key key) {
    std::lock_guard<std::mutex> guard(lock);
    auto found = busy_until_ms.find(key);
    return found == busy_until_ms.end() ? 0.0 : found->second;
  }
  void delay(Key key, double until_ms) {
    std::lock_guard<std::mutex> guard(lock);
    double& own = busy_until_ms[key];
    own = std::max(own, until_ms);
  }
  double all_ready_ms(DeviceIndex index) {
    std::lock_guard<std::mutex> guard(lock);
    double last = 0.0;
    for (const auto& [key, until] : busy_until_ms)
      if (key.first == index) last = std::max(last, until);
    return last;
  }
};
Streams streams;

Key key_of(const Stream& stream) { return {resolved(stream.device_index()), stream.id()}; }
Key current_key(DeviceIndex index) { return {resolved(index), chosen[resolved(index)]}; }


// --------------------------------------------------------------------------------------- order of work on streams

// Work is done at once, so a missing wait does no harm here. It is found by what each stream knows to be done before
// its next work: its own, what it has waited for, and what the host has. Two uses of the same memory, of which one
// writes, are a race if the later does not know of the earlier. So is memory that is freed while another stream may
// use it, unless that was told by `record_stream`. What the host learns counts as known to all its threads.
constexpr StreamId POOL = 64;  // streams of a device; those made later are the same ones again, as CUDA's are
using Clock = std::vector<int64_t>;  // by stream, how much of its work

size_t slot_of(Key key) { return static_cast<size_t>(key.first) * POOL + static_cast<size_t>(key.second); }

struct Uses {  // of one piece of memory
  size_t home;  // the stream for which it was allocated
  std::pair<size_t, int64_t> write;  // the last: stream, number of its work
  std::map<size_t, int64_t> reads;   // since then
  std::set<size_t> kept;             // by `record_stream`
};

struct Order {
  std::mutex lock;
  std::vector<Clock> known = std::vector<Clock>(COUNT * POOL, Clock(COUNT * POOL, 0));
  Clock host = Clock(COUNT * POOL, 0);
  std::vector<std::string> races;

  static void join(Clock& clock, const Clock& other) {
    for (size_t i = 0; i < clock.size(); i++) clock[i] = std::max(clock[i], other[i]);
  }
  Clock at(Key key) {
    std::lock_guard<std::mutex> guard(lock);
    return known[slot_of(key)];
  }
  void wait(Key key, const Clock& clock) {
    std::lock_guard<std::mutex> guard(lock);
    join(known[slot_of(key)], clock);
  }
  void host_waits(const Clock& clock) {
    std::lock_guard<std::mutex> guard(lock);
    join(host, clock);
  }
  void host_waits_for(DeviceIndex index) {
    std::lock_guard<std::mutex> guard(lock);
    for (StreamId id = 0; id < POOL; id++) join(host, known[slot_of({index, id})]);
  }

  /// A stream is given work that reads and writes this memory.
  void work(const std::string& name, Key key, const std::vector<Uses*>& read, const std::vector<Uses*>& written) {
    std::lock_guard<std::mutex> guard(lock);
    const size_t own = slot_of(key);
    Clock& clock = known[own];
    join(clock, host);
    const int64_t number = ++clock[own];
    for (Uses* uses : read) {
      check(name, own, "reads what", uses->write, "writes");
      uses->reads[own] = number;
    }
    for (Uses* uses : written) {
      check(name, own, "writes what", uses->write, "writes");
      for (const auto& one : uses->reads) check(name, own, "writes what", one, "reads");
      uses->write = {own, number};
      uses->reads.clear();
    }
  }
  void free(const Uses& uses) {
    std::lock_guard<std::mutex> guard(lock);
    const auto check_one = [&](std::pair<size_t, int64_t> use) {
      if (use.first != uses.home && !uses.kept.count(use.first) && use.second > host[use.first])
        check("the allocator", uses.home, "has back what", use, "uses");
    };
    check_one(uses.write);
    for (const auto& one : uses.reads) check_one(one);
  }

 private:
  void check(const std::string& name, size_t own, const char* does, std::pair<size_t, int64_t> use, const char* did) {
    if (use.second <= known[own][use.first] || races.size() >= 1000) return;
    std::ostringstream text;
    text << name << " on stream " << own % POOL << " of cuda:" << own / POOL << ' ' << does << " stream "
         << use.first % POOL << " of cuda:" << use.first / POOL << ' ' << did << ", and has not waited for it";
    races.push_back(text.str());
  }
};
Order& order() {
  static Order one;
  return one;
}

struct EventAt {
  double passed_ms;
  Clock clock;
};

// ---------------------------------------------------------------------------------------------------------- memory

struct Usage {
  std::atomic<int64_t> limit{CAPACITY}, allocated{0}, peak{0}, reserved{0}, reserved_peak{0}, count{0}, refused{0};
};
Usage usage[MOST];

std::string in_gib(int64_t bytes) {
  char text[32];
  if (bytes >= 1 << 30) {
    std::snprintf(text, sizeof text, "%.2f GiB", static_cast<double>(bytes) / (1 << 30));
  } else {
    std::snprintf(text, sizeof text, "%.2f MiB", static_cast<double>(bytes) / (1 << 20));
  }
  return text;
}

void raise_to(std::atomic<int64_t>& top, int64_t value) {
  int64_t seen = top;
  while (value > seen && !top.compare_exchange_weak(seen, value)) {
  }
}

void give_bytes(DeviceIndex index, int64_t bytes) {
  usage[index].allocated -= bytes;
  usage[index].count--;
}

void take_bytes(DeviceIndex index, int64_t bytes) {
  Usage& of = usage[index];
  const int64_t now = of.allocated += bytes;
  if (now > of.limit) {
    of.allocated -= bytes;
    of.refused++;
    std::ostringstream text;
    text << "CUDA out of memory. Tried to allocate " << in_gib(bytes) << ". GPU " << static_cast<int>(index)
         << " has a total capacity of " << in_gib(CAPACITY) << " of which " << in_gib(of.limit - (now - bytes))
         << " is free. Of the allocated memory " << in_gib(now - bytes) << " is allocated by PyTorch, and "
         << in_gib(of.reserved - (now - bytes)) << " is reserved by PyTorch but unallocated.";
    TORCH_CHECK_WITH(OutOfMemoryError, false, text.str());
  }
  of.count++;
  raise_to(of.peak, now);
  raise_to(of.reserved, (now + BLOCK - 1) / BLOCK * BLOCK);
  raise_to(of.reserved_peak, of.reserved);
}

thread_local DeviceIndex computing_on = -1;  // the device whose kernel this thread runs; -1: none

/// In front of what the host's allocator hands out: how much it is, and of which device's memory until it is freed.
struct alignas(64) Label {
  size_t size;
  DeviceIndex index;  // -1: of none
  Uses* uses;
};

/// The CPU's allocator. What a kernel of a device asks it for counts as that device's, results and scratch alike.
struct HostMemory final : c10::Allocator {
  c10::Allocator* inner = c10::GetCPUAllocator();

  static void release(void* data) {
    if (!data) return;
    auto* label = static_cast<Label*>(data) - 1;
    if (label->index >= 0) {
      give_bytes(label->index, static_cast<int64_t>(label->size));
      order().free(*label->uses);
      delete label->uses;
    }
    host_deleter(label);
  }
  static inline c10::DeleterFnPtr host_deleter = c10::GetCPUAllocator()->raw_deleter();

  c10::DataPtr allocate(size_t size) override {
    const Device host(DeviceType::CPU);
    if (size == 0) return {nullptr, nullptr, &release, host};
    if (computing_on >= 0) take_bytes(computing_on, static_cast<int64_t>(size));
    Label* label = nullptr;
    try {
      label = static_cast<Label*>(inner->raw_allocate(size + sizeof(Label)));
    } catch (...) {
      if (computing_on >= 0) give_bytes(computing_on, static_cast<int64_t>(size));
      throw;
    }
    Uses* uses = computing_on < 0 ? nullptr : new Uses{slot_of(current_key(computing_on)), {0, 0}, {}, {}};
    *label = {size, computing_on, uses};
    return {label + 1, label + 1, &release, host};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
};

HostMemory& host_memory() {
  static HostMemory one;
  return one;
}

/// While it lives, this thread runs a kernel of a device.
struct Computing {
  DeviceIndex before = computing_on;
  explicit Computing(DeviceIndex index) { computing_on = index; }
  ~Computing() { computing_on = before; }
};

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    check_alive();
    Computing here(current);
    c10::DataPtr data = host_memory().allocate(size);
    data.unsafe_set_device(Device(GPU, current));
    return data;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &HostMemory::release; }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (Usage& of : usage) of.reserved = (of.allocated + BLOCK - 1) / BLOCK * BLOCK;
  }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex index) override {
    const Usage& of = usage[resolved(index)];
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& allocated = stats.allocated_bytes[0];  // of the pools together
    allocated.current = of.allocated;
    allocated.peak = of.peak;
    stats.active_bytes[0] = stats.requested_bytes[0] = allocated;
    stats.reserved_bytes[0].current = of.reserved;
    stats.reserved_bytes[0].peak = of.reserved_peak;
    stats.allocation[0].current = stats.active[0].current = of.count;
    stats.num_ooms = of.refused;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex index) override {
    Usage& of = usage[resolved(index)];
    of.peak = of.allocated.load();
    of.reserved_peak = of.reserved.load();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex index) override {
    const Usage& of = usage[resolved(index)];
    return {static_cast<size_t>(std::max<int64_t>(0, of.limit - of.allocated)), static_cast<size_t>(CAPACITY)};
  }
};
DeviceMemory device_memory;

/// Pinned memory of the host: ordinary memory whose addresses are known.
struct PinnedMemory final : c10::Allocator {
  struct Block {
    c10::DataPtr data;
    std::pair<const char*, const char*> range;
    PinnedMemory* owner;
  };
  std::map<const char*, const char*> ranges;  // begin to end
  std::mutex lock;

  static void release(void* held) {
    auto* block = static_cast<Block*>(held);
    {
      std::lock_guard<std::mutex> guard(block->owner->lock);
      block->owner->ranges.erase(block->range.first);
    }
    delete block;
  }
  c10::DataPtr allocate(size_t size) override {
    c10::DataPtr data = host_memory().inner->allocate(std::max<size_t>(size, 1));
    auto* begin = static_cast<char*>(data.get());
    const char* end = begin + std::max<size_t>(size, 1);
    std::lock_guard<std::mutex> guard(lock);
    ranges[begin] = end;
    return {begin, new Block{std::move(data), {begin, end}, this}, &release, Device(DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, std::size_t size) const override { std::memcpy(to, from, size); }
  bool holds(const void* address) {
    const char* at = static_cast<const char*>(address);
    std::lock_guard<std::mutex> guard(lock);
    auto next = ranges.upper_bound(at);
    return next != ranges.begin() && at < std::prev(next)->second;
  }
};
PinnedMemory pinned_memory;

// ----------------------------------------------------------------------------------------------------------- guard

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return GPU; }
  DeviceIndex deviceCount() const noexcept override { return COUNT; }
  Device getDevice() const override { return Device(GPU, current); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < COUNT, "CUDA error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override { current = resolved(device.index()); }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }

  Stream getStream(Device device) const override {
    const DeviceIndex index = resolved(device.index());
    return Stream(Stream::UNSAFE, Device(GPU, index), chosen[index]);
  }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device_of(device.index())); }
  Stream getNewStream(Device device, int) const override {
    return Stream(Stream::UNSAFE, device_of(device.index()), 1 + num_streams++ % (POOL - 1));
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    chosen[resolved(stream.device_index())] = stream.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override { return now_ms() >= streams.ready_ms(key_of(stream)); }
  void synchronizeStream(const Stream& stream) const override {
    check_alive();
    order().host_waits(order().at(key_of(stream)));
    wait_until(streams.ready_ms(key_of(stream)));
  }
  void synchronizeDevice(const DeviceIndex index) const override {
    check_alive();
    order().host_waits_for(resolved(index));
    wait_until(streams.all_ready_ms(resolved(index)));
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    check_alive();
    if (!*event) *event = new EventAt;
    const Key key = key_of(stream);
    *static_cast<EventAt*>(*event) = {std::max(now_ms(), streams.ready_ms(key)), order().at(key)};
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<EventAt*>(event); }
  void block(void* event, const Stream& stream) const override {
    if (!event) return;
    streams.delay(key_of(stream), static_cast<EventAt*>(event)->passed_ms);
    order().wait(key_of(stream), static_cast<EventAt*>(event)->clock);
  }
  bool queryEvent(void* event) const override { return !event || now_ms() >= static_cast<EventAt*>(event)->passed_ms; }
  void synchronizeEvent(void* event) const override {
    check_alive();
    if (!event) return;
    order().host_waits(static_cast<EventAt*>(event)->clock);
    wait_until(static_cast<EventAt*>(event)->passed_ms);
  }
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {  // in single precision, as CUDA's
    return static_cast<float>(static_cast<EventAt*>(end)->passed_ms - static_cast<EventAt*>(start)->passed_ms);
  }
};

// ------------------------------------------------------------------------------------------------------ generators

/// A generator of a device. It draws what the CPU's does, but other numbers for the same seed, as a GPU's.
struct DeviceGenerator final : c10::GeneratorImpl {
  static constexpr uint64_t OTHER = 0x5DEECE66DULL;
  Generator inner;

  explicit DeviceGenerator(DeviceIndex index, Generator of = at::detail::createCPUGenerator())
      : GeneratorImpl(Device(GPU, index), DispatchKeySet(DispatchKey::CUDA)), inner(std::move(of)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed ^ OTHER); }
  uint64_t current_seed() const override { return inner.current_seed() ^ OTHER; }
  uint64_t seed() override {
    const uint64_t made = c10::detail::getNonDeterministicRandom(true);
    set_current_seed(made);
    return made;
  }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(device_.index(), inner.clone()); }
};

const Generator& default_generator(DeviceIndex index) {
  static const std::vector<Generator> all = [] {
    std::vector<Generator> made;
    for (DeviceIndex k = 0; k < COUNT; k++) {
      made.push_back(at::make_generator<DeviceGenerator>(k));
      made.back().set_current_seed(c10::default_rng_seed_val);
    }
    return made;
  }();
  return all.at(resolved(index));
}

std::atomic<bool> lending_defaults{false};  // Python has no other way to a device's default generator

const Generator& on_host(const Generator& generator) {
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->inner;
}

}  // namespace

// ----------------------------------------------------------------------------------------------------------- hooks

namespace at {
struct StandinHooks final : CUDAHooksInterface {
  explicit StandinHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return COUNT; }
  DeviceIndex deviceCount() const override { return COUNT; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { Guard().setDevice(Device(GPU, index)); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return Guard().exchangeDevice(Device(GPU, index)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  const Generator& getDefaultGenerator(DeviceIndex index) const override { return default_generator(index); }
  Generator getNewGenerator(DeviceIndex index) const override {
    return lending_defaults ? default_generator(index) : at::make_generator<DeviceGenerator>(resolved(index));
  }
  bool isPinnedPtr(const void* address) const override { return pinned_memory.holds(address); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  void deviceSynchronize(DeviceIndex index) const override { Guard().synchronizeDevice(index); }
};
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", StandinHooks);
}  // namespace at

namespace {
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

[[maybe_unused]] const bool installed = [] {
  c10::SetAllocator(GPU, &device_memory);
  c10::SetCPUAllocator(&host_memory(), /*priority=*/100);
  return true;
}();

// ------------------------------------------------------------------------------------- reads of a device by the host

struct HostReads {
  std::map<uint64_t, int64_t> by_thread;
  std::mutex lock;
  std::atomic<int> mode{0};  // as torch.cuda.set_sync_debug_mode: 1 warns, 2 raises

  void check() const {
    TORCH_CHECK(mode != 2, "called a synchronizing CUDA operation");
    if (mode == 1) TORCH_WARN("called a synchronizing CUDA operation");
  }
  void note(DeviceIndex index) {
    {
      std::lock_guard<std::mutex> guard(lock);
      by_thread[static_cast<uint64_t>(pthread_self())]++;
    }
    order().host_waits(order().at(current_key(index)));
    wait_until(streams.ready_ms(current_key(index)));
  }
};
HostReads host_reads;

// ----------------------------------------------------------------------------------------------------------- calls

void release_storage(void* held) { delete static_cast<c10::Storage*>(held); }

/// The same memory as that of ``storage``, which it keeps, said to lie elsewhere.
c10::Storage alias_of(const c10::Storage& storage, Device device, c10::Allocator* allocator) {
  c10::DataPtr data(storage.mutable_data(), new c10::Storage(storage), &release_storage, device);
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(data), allocator, /*resizable=*/true));
}

c10::Storage on_host(const c10::Storage& storage) {
  return alias_of(storage, Device(DeviceType::CPU), &host_memory());
}

/// A tensor that looks as ``like`` does, in other memory.
Tensor tensor_in(c10::Storage storage, const Tensor& like, DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

Tensor host_view(c10::Storage storage, const Tensor& of) {
  Tensor view = tensor_in(std::move(storage), of, DispatchKey::CPU);
  if (of.is_conj()) view._set_conj(true);
  if (of.is_neg()) view._set_neg(true);
  if (of.unsafeGetTensorImpl()->is_wrapped_number()) view.unsafeGetTensorImpl()->set_wrapped_number(true);
  return view;
}

/// What has been done with the memory of a device's tensor; null if it has none.
Uses* uses_of(const c10::DataPtr& data) {
  if (data.get_deleter() == &release_storage)
    return uses_of(static_cast<c10::Storage*>(data.get_context())->data_ptr());
  if (data.get_deleter() != &HostMemory::release || !data.get()) return nullptr;
  return (static_cast<Label*>(data.get()) - 1)->uses;
}
void add_uses(std::vector<Uses*>& to, const Tensor& tensor) {
  Uses* uses = uses_of(tensor.storage().data_ptr());
  if (uses) to.push_back(uses);
}

bool on_device(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == GPU; }

/// What the stand-in must know of an operator; found once for each.
struct Traits {
  bool takes_host_indices;  // CUDA's kernels move such indices themselves
  bool takes_host_scalars;  // tensors of the CPU without a dimension count as numbers
  bool reads_to_host;       // the host waits for the result
  bool reads_masks;         // it does if an index is a mask
  bool checks_indices;      // on the device: a wrong one is an assertion of the kernel
  bool views;               // its result is a view of what it is given, which it does not read
  bool draws;               // it draws random numbers, and cannot be given a generator
};

bool views(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return false;
}

Traits traits_of(const c10::OperatorHandle& op) {
  static const std::set<std::string> indexing{"aten::index",     "aten::index_put_",    "aten::_index_put_impl_",
                                              "aten::index_put", "aten::_unsafe_index", "aten::_unsafe_index_put"};
  static const std::set<std::string> scalars{"aten::where", "aten::masked_fill_", "aten::masked_fill", "aten::fill_",
                                             "aten::lerp",  "aten::lerp_",        "aten::index_fill_"};
  static const std::set<std::string> reading{"aten::_local_scalar_dense", "aten::equal",      "aten::nonzero",
                                             "aten::masked_select",       "aten::_unique2",   "aten::unique_dim",
                                             "aten::unique_consecutive",  "aten::_pack_padded_sequence"};
  static const std::set<std::string> checking{"aten::nll_loss_forward", "aten::nll_loss2d_forward", "aten::embedding",
                                              "aten::index_select",     "aten::gather",             "aten::scatter",
                                              "aten::scatter_",         "aten::scatter_add_",       "aten::index_add_"};
  const std::string& name = op.schema().name();
  const bool indexes = indexing.count(name) > 0;
  return {indexes,
          op.hasTag(at::Tag::pointwise) || scalars.count(name) > 0 || name.rfind("aten::_foreach_", 0) == 0 || indexes,
          reading.count(name) > 0,
          indexes && name.find("put") != name.npos,  // the others have made numbers of it before
          indexes || checking.count(name) > 0,
          views(op.schema()),
          op.hasTag(at::Tag::nondeterministic_seeded) && !op.schema().argumentIndexWithName("generator")};
}

const Traits& traits(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, Traits> known;
  const auto* key = &op.schema();
  auto found = known.find(key);
  return found != known.end() ? found->second : known.emplace(key, traits_of(op)).first->second;
}

/// Apply a function to every tensor of a value.
template <class Each>
void visit(const IValue& value, const Each& each) {
  if (value.isTensor()) {
    each(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorVector()) each(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const auto& tensor : value.toOptionalTensorVector())
      if (tensor) each(*tensor);
  }
}

/// The value with every tensor replaced.
template <class Change>
IValue replaced(const IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional<Tensor>(change(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

/// One call of an operator on a device: its tensors there, and views of them on the host for the CPU's kernel.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), of_(traits(op)), stack_(stack), first_(stack->size() - op.schema().arguments().size()) {}

  void run() {
    find_device();
    check_arguments();
    const bool reads = reads_to_host();
    if (reads) host_reads.check();
    order_given();
    prepare_arguments();
    compute();
    write_back();
    give_results();
    if (!made_.empty()) order().work(op_.schema().name(), current_key(device_.index()), {}, made_);
    if (reads) host_reads.note(device_.index());
  }

 private:
  size_t num_arguments() const { return op_.schema().arguments().size(); }
  const c10::Argument& argument(size_t i) const { return op_.schema().arguments()[i]; }
  IValue& value(size_t i) const { return (*stack_)[first_ + i]; }

  /// Whether an argument is written to. Steps of fused optimizers say so of gradients, and do so only to unscale them.
  bool writes(size_t i) const {
    const auto* alias = argument(i).alias_info();
    if (alias == nullptr || !alias->isWrite()) return false;
    const auto scale = op_.schema().argumentIndexWithName("grad_scale");
    return argument(i).name() != "grads" || !scale || !value(*scale).isNone();
  }

  /// That of the tensors; of an operator without any, the one that it names.
  void find_device() {
    bool found = false;
    for (size_t i = 0; i < num_arguments(); i++) {
      if (value(i).isDevice()) device_ = value(i).toDevice();
      visit(value(i), [&](const Tensor& tensor) {
        if (on_device(tensor) && !found) device_ = tensor.device(), found = true;
      });
    }
    if (device_.type() == GPU && !device_.has_index()) device_ = Device(GPU, current);
  }

  void check_arguments() const {
    for (size_t i = 0; i < num_arguments(); i++) {
      const bool written = writes(i);
      const bool index = of_.takes_host_indices && argument(i).name() == "indices";
      visit(value(i), [&](const Tensor& tensor) {
        if (!tensor.defined() || tensor.device() == device_) return;
        const bool number = tensor.device().is_cpu() && tensor.dim() == 0 && of_.takes_host_scalars && !written;
        TORCH_CHECK(number || (index && tensor.device().is_cpu()),
                    "Expected all tensors to be on the same device, but found at least two devices, ", device_, " and ",
                    tensor.device(), "! (when checking argument for argument ", argument(i).name(), " in method ",
                    op_.schema().name(), ")");
      });
    }
  }

  bool reads_to_host() const {
    if (!of_.reads_masks) return of_.reads_to_host;
    bool masks = false;
    for (size_t i = 0; i < num_arguments(); i++)
      if (argument(i).name() == "indices")
        visit(value(i), [&](const Tensor& t) { masks |= t.scalar_type() == kBool || t.scalar_type() == kByte; });
    return masks;
  }

  void order_given() const {
    if (device_.type() != GPU || of_.views) return;
    std::vector<Uses*> read, written;
    for (size_t i = 0; i < num_arguments(); i++) {
      auto& uses = writes(i) ? written : read;
      visit(value(i), [&](const Tensor& tensor) {
        if (on_device(tensor)) add_uses(uses, tensor);
      });
    }
    order().work(op_.schema().name(), current_key(device_.index()), read, written);
  }

  void prepare_arguments() {
    for (size_t i = 0; i < num_arguments(); i++) {
      IValue& given = value(i);
      const std::string& name = argument(i).name();
      if (given.isDevice() && given.toDevice().type() == GPU) {
        given = Device(DeviceType::CPU);
      } else if (given.isGenerator()) {
        const auto generator = given.toGenerator();
        TORCH_CHECK(generator.device().type() == GPU, "Expected a 'cuda' device type for generator but found 'cpu'");
        given = on_host(generator);
      } else if (given.isNone() && name == "generator") {
        given = on_host(default_generator(device_.index()));
      } else if (name == "pin_memory") {
        given = IValue();
      } else {
        given = replaced(given, [this](const Tensor& tensor) { return to_host(tensor); });
      }
    }
  }

  void compute() {
    TORCH_CHECK(!of_.draws, "the stand-in cannot draw random numbers for ", op_.schema().name());
    Computing here(device_.index());
    try {
      op_.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack_);
    } catch (const c10::IndexError& error) {
      const std::string text = error.what_without_backtrace();
      const bool outside = text.find("out of bounds") != text.npos || text.find("out of range in self") != text.npos;
      if (of_.checks_indices && outside) fail_assertion();
      throw;
    }
  }

  /// A kernel may have resized what it has written, or given it another shape.
  void write_back() const {
    for (const auto& [outer, inner] : storages_) {
      if (inner.data() == outer.data() && inner.nbytes() == outer.nbytes()) continue;
      auto* to = outer.unsafeGetStorageImpl();
      to->set_data_ptr_noswap(
          c10::DataPtr(inner.mutable_data(), new c10::Storage(inner), &release_storage, device_));
      to->set_nbytes(inner.nbytes());
    }
    for (const auto& [outer, inner] : tensors_)
      if (outer.sizes() != inner.sizes() || outer.strides() != inner.strides() ||
          outer.storage_offset() != inner.storage_offset())
        outer.unsafeGetTensorImpl()->set_sizes_and_strides(inner.sizes(), inner.strides(), inner.storage_offset());
  }

  void give_results() {
    const size_t count = op_.schema().returns().size();
    for (size_t i = stack_->size() - count; i < stack_->size(); i++)
      (*stack_)[i] = replaced((*stack_)[i], [this](const Tensor& tensor) { return to_device(tensor); });
  }

  Tensor to_host(const Tensor& tensor) {
    if (!on_device(tensor)) return tensor;
    for (const auto& [outer, inner] : tensors_)
      if (outer.is_same(tensor)) return inner;
    tensors_.emplace_back(tensor, host_view(host_storage(tensor.storage()), tensor));
    return tensors_.back().second;
  }

  const c10::Storage& host_storage(const c10::Storage& storage) {
    for (const auto& [outer, inner] : storages_)
      if (outer.is_alias_of(storage) && outer.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) return inner;
    storages_.emplace_back(storage, on_host(storage));
    return storages_.back().second;
  }

  Tensor to_device(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu() || device_.type() != GPU || !tensor.has_storage()) return tensor;
    for (const auto& [outer, inner] : tensors_)
      if (inner.is_same(tensor)) return outer;
    return tensor_in(device_storage(tensor.storage()), tensor, DispatchKey::CUDA);
  }

  const c10::Storage& device_storage(const c10::Storage& storage) {
    for (const auto& [outer, inner] : storages_)
      if (inner.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) return outer;
    if (Uses* uses = uses_of(storage.data_ptr())) made_.push_back(uses);
    storages_.emplace_back(alias_of(storage, device_, &device_memory), storage);
    return storages_.back().first;
  }

  const c10::OperatorHandle& op_;
  const Traits& of_;
  Stack* stack_;
  const size_t first_;
  Device device_ = Device(GPU, current);
  std::vector<Uses*> made_;
  std::vector<std::pair<Tensor, Tensor>> tensors_;              // on the device, on the host
  std::vector<std::pair<c10::Storage, c10::Storage>> storages_;  // likewise
};

std::atomic<int64_t> num_calls{0};

void fallback(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) {
  check_alive();
  num_calls++;
  at::AutoDispatchBelowADInplaceOrView below;
  Call(op, stack).run();
}

// ------------------------------------------------------------------------------------------- operators of their own

Tensor host_view(const Tensor& tensor) {
  return on_device(tensor) ? host_view(on_host(tensor.storage()), tensor) : tensor;
}

/// The streams between which a copy runs wait for each other, as CUDA's do if they are of two devices.
void order_copy(const Tensor& to, const Tensor& from) {
  std::vector<Uses*> read, written;
  if (on_device(from)) add_uses(read, from);
  if (on_device(to)) add_uses(written, to);
  const Key source = current_key((on_device(from) ? from : to).device().index());
  if (!on_device(from) || !on_device(to) || from.device() == to.device()) {
    order().work("aten::copy_", source, read, written);
    return;
  }
  const Key target = current_key(to.device().index());
  order().wait(source, order().at(target));
  order().work("aten::copy_", source, read, written);
  order().wait(target, order().at(source));
}

/// Between any two devices. The host waits for a copy to itself, unless the target is pinned and it need not.
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  check_alive();
  num_calls++;
  at::AutoDispatchBelowADInplaceOrView below;
  const bool reads = !on_device(self) && !(non_blocking && pinned_memory.holds(self.data_ptr()));
  if (reads) host_reads.check();
  Tensor to = host_view(self);
  to.copy_(host_view(source));
  order_copy(self, source);
  if (reads) host_reads.note(source.device().index());
  return self;
}

Tensor& set_storage_at(Tensor& self, Storage source, int64_t offset, IntArrayRef sizes, IntArrayRef strides) {
  TORCH_CHECK(source.device() == self.device(),
              "Expected all tensors to be on the same device, but found at least two devices, ", self.device(), " and ",
              source.device(), "! (when checking arguments in method set_)");
  std::vector<int64_t> dense(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) dense[i - 1] = dense[i] * std::max<int64_t>(sizes[i], 1);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(sizes, strides.empty() ? IntArrayRef(dense) : strides, offset);
  return self;
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_at(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor& set_storage(Tensor& self, Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage_at(self, std::move(source), 0, {count}, {});
}
/// What ``UntypedStorage.resize_`` does for CUDA, which torch has only where it was built for it.
void resize_storage(const Storage& storage, int64_t num_bytes) {
  check_alive();
  auto* of = storage.unsafeGetStorageImpl();
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr data = device_memory.allocate(static_cast<size_t>(num_bytes));
  const size_t kept = std::min<size_t>(of->nbytes(), static_cast<size_t>(num_bytes));
  if (kept) std::memcpy(data.get(), of->data(), kept);
  of->set_data_ptr_noswap(std::move(data));
  of->set_nbytes(static_cast<size_t>(num_bytes));
}
void record_stream(Tensor& self, Stream stream) {
  TORCH_CHECK(on_device(self) && stream.device_type() == GPU, "record_stream is only for tensors of a device");
  Uses* uses = uses_of(self.storage().data_ptr());
  std::lock_guard<std::mutex> guard(order().lock);
  if (uses) uses->kept.insert(slot_of(key_of(stream)));
}

/// Attention is computed step by step: its results lie in memory in another order than those of the CPU's kernel.
int64_t choose_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                         std::optional<double>, bool) {
  return 0;
}

/// CUDA's dropout is one kernel, whose mask is a result.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {x.clone(), at::ones_like(x, x.options().dtype(kBool))};
  if (p == 1) return {at::zeros_like(x), at::zeros_like(x, x.options().dtype(kBool))};
  Tensor mask = at::empty_like(x, x.options().dtype(kBool)).bernoulli_(1 - p);
  return {x.mul(mask).mul_(1 / (1 - p)), mask};
}

// The cells of recurrent layers are kernels that only CUDA has: written out here.

Tensor with_bias(const Tensor& gates, const std::optional<Tensor>& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}
Tensor sigmoid_grad(const Tensor& y) { return y * (1 - y); }
Tensor tanh_grad(const Tensor& y) { return 1 - y * y; }

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& of_input, const Tensor& of_hidden, const Tensor& cx,
                                             const std::optional<Tensor>& input_bias,
                                             const std::optional<Tensor>& hidden_bias) {
  const auto gates = (with_bias(of_input, input_bias) + with_bias(of_hidden, hidden_bias)).chunk(4, 1);
  const Tensor in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(), out = gates[3].sigmoid();
  const Tensor cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}
std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const std::optional<Tensor>& grad_hy,
                                                      const std::optional<Tensor>& grad_cy, const Tensor& cx,
                                                      const Tensor& cy, const Tensor& workspace, bool has_bias) {
  const auto gates = workspace.chunk(4, 1);
  const Tensor in = gates[0], forget = gates[1], cell = gates[2], out = gates[3], tanh = cy.tanh();
  const Tensor of_hy = grad_hy && grad_hy->defined() ? *grad_hy : at::zeros_like(cy);
  Tensor of_cell = of_hy * out * tanh_grad(tanh);
  if (grad_cy && grad_cy->defined()) of_cell = of_cell + *grad_cy;
  const Tensor grads = at::cat({of_cell * cell * sigmoid_grad(in), of_cell * cx * sigmoid_grad(forget),
                                of_cell * in * tanh_grad(cell), of_hy * tanh * sigmoid_grad(out)},
                               1);
  return {grads, of_cell * forget, has_bias ? grads.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& of_input, const Tensor& of_hidden, const Tensor& hx,
                                    const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  const auto left = with_bias(of_input, input_bias).chunk(3, 1), right = with_bias(of_hidden, hidden_bias).chunk(3, 1);
  const Tensor reset = (left[0] + right[0]).sigmoid(), keep = (left[1] + right[1]).sigmoid();
  const Tensor fresh = (left[2] + reset * right[2]).tanh();
  return {fresh + keep * (hx - fresh), at::cat({reset, keep, fresh, hx, right[2]}, 1)};
}
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy, const Tensor& workspace,
                                                                     bool has_bias) {
  const auto parts = workspace.chunk(5, 1);
  const Tensor reset = parts[0], keep = parts[1], fresh = parts[2], hx = parts[3], hidden = parts[4];
  const Tensor of_keep = grad_hy * (hx - fresh) * sigmoid_grad(keep);
  const Tensor of_fresh = grad_hy * (1 - keep) * tanh_grad(fresh);
  const Tensor of_reset = of_fresh * hidden * sigmoid_grad(reset);
  const Tensor of_input = at::cat({of_reset, of_keep, of_fresh}, 1);
  const Tensor of_hidden = at::cat({of_reset, of_keep, of_fresh * reset}, 1);
  return {of_input, of_hidden, grad_hy * keep, has_bias ? of_input.sum(0) : Tensor(),
          has_bias ? of_hidden.sum(0) : Tensor()};
}

// CUDA's softmax may read half precision and return float; the CPU's may not.
#define SOFTMAX(NAME)                                                                                    \
  Tensor NAME(const Tensor& x, int64_t dim, bool to_float) {                                             \
    const Tensor in = to_float ? x.to(kFloat) : x;                                                       \
    Tensor out = at::empty({0}, in.options());                                                           \
    return at::NAME##_out(out, in, dim, false);                                                          \
  }                                                                                                      \
  Tensor NAME##_backward_data(const Tensor& grad, const Tensor& y, int64_t dim, ScalarType dtype) {      \
    Tensor out = at::empty({0}, grad.options());                                                         \
    return at::NAME##_backward_data_out(out, grad, y, dim, grad.scalar_type()).to(dtype);                \
  }
namespace softmax {
SOFTMAX(_softmax)
SOFTMAX(_log_softmax)
}  // namespace softmax
#undef SOFTMAX

TORCH_LIBRARY(standin, m) { m.def("resize_storage(Storage storage, int num_bytes) -> ()", &resize_storage); }

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("copy_", &copy_);
  m.impl("set_.source_Storage_storage_offset", &set_storage_at);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("record_stream", &record_stream);
  m.impl("_fused_sdp_choice", &choose_attention);
  m.impl("native_dropout", &native_dropout);
  m.impl("_softmax", &softmax::_softmax);
  m.impl("_softmax_backward_data", &softmax::_softmax_backward_data);
  m.impl("_log_softmax", &softmax::_log_softmax);
  m.impl("_log_softmax_backward_data", &softmax::_log_softmax_backward_data);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
  // made of others in torch, which would choose kernels of cuDNN's
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
}  // namespace

// ----------------------------------------------------------------------------------------------------- C functions

extern "C" {
int64_t standin_calls() { return num_calls; }
int64_t standin_count() { return COUNT; }
int64_t standin_capacity() { return CAPACITY; }
void standin_limit(int index, int64_t bytes) { usage[index].limit = bytes; }
void standin_lend_defaults(int lend) { lending_defaults = lend != 0; }
void standin_assert() { asserted = true; }
void standin_sleep(double milliseconds) {
  const Key key = current_key(current);
  streams.delay(key, std::max(now_ms(), streams.ready_ms(key)) + milliseconds);
}
int64_t standin_num_races() { return static_cast<int64_t>(order().races.size()); }
const char* standin_race(int64_t number) { return order().races.at(static_cast<size_t>(number)).c_str(); }
void standin_sync_mode(int mode) { host_reads.mode = mode; }

/// Reads by the host, of up to ``room`` threads; returns how many threads there are.
int64_t standin_host_reads(uint64_t* threads, int64_t* counts, int64_t room) {
  std::lock_guard<std::mutex> guard(host_reads.lock);
  int64_t i = 0;
  for (const auto& [thread, count] : host_reads.by_thread) {
    if (i < room) threads[i] = thread, counts[i] = count;
    i++;
  }
  return i;
}
}
