//! The part of libcuda and NVRTC that the benchmark needs, loaded at run time.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr;

use libloading::Library;

use crate::error::{Error, Result};

const DRIVER: RequiredLibrary = RequiredLibrary {
    names: &["libcuda.so.1"],
    remedy: "it comes with NVIDIA's driver; without a GPU choose another device",
};
/// Every version has the functions that are needed.
const COMPILER: RequiredLibrary = RequiredLibrary {
    names: &["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2"],
    remedy: "install NVIDIA's run-time compiler (package libnvrtc)",
};

/// `CU_MEMHOSTALLOC_DEVICEMAP`: the memory is mapped into the GPU's address space.
const HOST_ALLOC_DEVICE_MAP: c_uint = 2;
const ATTRIBUTE_MAJOR: c_int = 75;
const ATTRIBUTE_MINOR: c_int = 76;
const ATTRIBUTE_PROCESSORS: c_int = 16;
const ATTRIBUTE_PROCESSOR_THREADS: c_int = 39;
const EVENT_DEFAULT: c_uint = 0;

type Handle = *mut c_void;
type Address = u64;

/// Looks up a function of a library.
fn symbol<T: Copy>(library: &Library, library_name: &str, name: &str) -> Result<T> {
    // SAFETY: the declarations in `functions!` below give each symbol the type in NVIDIA's manual. Only the function
    // pointer is copied, and the structure that receives it also owns the library.
    let found = unsafe { library.get::<T>(name.as_bytes()) };
    found
        .map(|function| *function)
        .map_err(|_| Error::Failed(format!("cuda: {library_name} lacks {name}: it is too old")))
}

/// A library that a CUDA device needs.
#[derive(Clone, Copy, Debug)]
pub struct RequiredLibrary {
    /// The file names to try, in order.
    names: &'static [&'static str],
    /// How to obtain the library if it is missing.
    pub remedy: &'static str,
}

impl RequiredLibrary {
    /// All libraries, in the order in which they are loaded.
    pub const ALL: [Self; 2] = [DRIVER, COMPILER];

    /// Returns the name of the library for messages.
    pub fn name(&self) -> &'static str {
        self.names[0]
    }

    /// Returns the file name under which this machine has the library, if it can be loaded.
    pub fn found(&self) -> Option<&'static str> {
        self.load().ok().map(|(_, name)| name)
    }

    fn load(&self) -> Result<(Library, &'static str)> {
        for name in self.names {
            // SAFETY: the initialisers of NVIDIA's libraries may run at any time and in any thread, and access no
            // memory of this program.
            if let Ok(library) = unsafe { Library::new(*name) } {
                return Ok((library, name));
            }
        }
        Error::wrong_use(format!("cuda: {} is missing; {}", self.name(), self.remedy))
    }
}

macro_rules! functions {
    ($(#[$doc:meta])* $name:ident { $($field:ident = $symbol:literal: fn($($argument:ty),*) -> c_int;)* }) => {
        $(#[$doc])*
        struct $name {
            $($field: unsafe extern "C" fn($($argument),*) -> c_int,)*
            _library: Library,
        }

        impl $name {
            fn of(library: Library, library_name: &str) -> Result<Self> {
                $(let $field = symbol(&library, library_name, $symbol)?;)*
                Ok(Self { $($field,)* _library: library })
            }
        }
    };
}

functions! {
    /// Functions of the driver.
    Driver {
        init = "cuInit": fn(c_uint) -> c_int;
        device_get = "cuDeviceGet": fn(*mut c_int, c_int) -> c_int;
        device_count = "cuDeviceGetCount": fn(*mut c_int) -> c_int;
        device_name = "cuDeviceGetName": fn(*mut c_char, c_int, c_int) -> c_int;
        device_pci_address = "cuDeviceGetPCIBusId": fn(*mut c_char, c_int, c_int) -> c_int;
        device_attribute = "cuDeviceGetAttribute": fn(*mut c_int, c_int, c_int) -> c_int;
        context_retain = "cuDevicePrimaryCtxRetain": fn(*mut Handle, c_int) -> c_int;
        context_release = "cuDevicePrimaryCtxRelease_v2": fn(c_int) -> c_int;
        context_set = "cuCtxSetCurrent": fn(Handle) -> c_int;
        synchronize = "cuCtxSynchronize": fn() -> c_int;
        module_unload = "cuModuleUnload": fn(Handle) -> c_int;
        module_load = "cuModuleLoadData": fn(*mut Handle, *const c_void) -> c_int;
        module_function = "cuModuleGetFunction": fn(*mut Handle, Handle, *const c_char) -> c_int;
        host_alloc = "cuMemHostAlloc": fn(*mut *mut c_void, usize, c_uint) -> c_int;
        host_device_pointer = "cuMemHostGetDevicePointer_v2": fn(*mut Address, *mut c_void, c_uint) -> c_int;
        host_free = "cuMemFreeHost": fn(*mut c_void) -> c_int;
        alloc = "cuMemAlloc_v2": fn(*mut Address, usize) -> c_int;
        free = "cuMemFree_v2": fn(Address) -> c_int;
        copy_in = "cuMemcpyHtoD_v2": fn(Address, *const c_void, usize) -> c_int;
        copy_out = "cuMemcpyDtoH_v2": fn(*mut c_void, Address, usize) -> c_int;
        launch = "cuLaunchKernel": fn(Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle,
            *mut *mut c_void, *mut *mut c_void) -> c_int;
        event_create = "cuEventCreate": fn(*mut Handle, c_uint) -> c_int;
        event_record = "cuEventRecord": fn(Handle, Handle) -> c_int;
        event_synchronize = "cuEventSynchronize": fn(Handle) -> c_int;
        event_elapsed = "cuEventElapsedTime": fn(*mut f32, Handle, Handle) -> c_int;
        event_destroy = "cuEventDestroy_v2": fn(Handle) -> c_int;
        error_name = "cuGetErrorName": fn(c_int, *mut *const c_char) -> c_int;
    }
}

functions! {
    /// Functions of the run-time compiler.
    Compiler {
        create = "nvrtcCreateProgram": fn(*mut Handle, *const c_char, *const c_char, c_int, *const *const c_char,
            *const *const c_char) -> c_int;
        compile = "nvrtcCompileProgram": fn(Handle, c_int, *const *const c_char) -> c_int;
        ptx_size = "nvrtcGetPTXSize": fn(Handle, *mut usize) -> c_int;
        ptx = "nvrtcGetPTX": fn(Handle, *mut c_char) -> c_int;
        log_size = "nvrtcGetProgramLogSize": fn(Handle, *mut usize) -> c_int;
        log = "nvrtcGetProgramLog": fn(Handle, *mut c_char) -> c_int;
        destroy = "nvrtcDestroyProgram": fn(*mut Handle) -> c_int;
    }
}

/// A GPU with its context and its compiled kernels.
pub(super) struct Gpu {
    driver: Driver,
    compiler: Compiler,
    device: c_int,
    context: Handle,
    /// The module with the compiled kernels.
    module: Handle,
    /// The number of words a transfer for which the module was compiled; 0 while there is no module.
    words: u32,
    /// Name from the driver.
    pub name: String,
    /// Address on the PCI bus, such as `0000:B7:00.0`.
    pub pci_address: String,
    /// Number of multiprocessors.
    pub processors: u32,
    /// Largest number of resident threads of a multiprocessor.
    pub processor_threads: u32,
}

// SAFETY: the driver's functions may be called from any thread in which the context is current, and every method that
// needs the context makes it current first.
unsafe impl Send for Gpu {}

/// Pinned memory of the host, mapped into the GPU's address space.
pub(super) struct PinnedBuffer {
    /// Address in the host's address space.
    pub host: *mut u8,
    /// Address in the GPU's address space.
    pub address: Address,
}

// SAFETY: the pointer is to memory without thread affinity, and all accesses through it are volatile or copies.
unsafe impl Send for PinnedBuffer {}

/// An argument of a kernel.
#[derive(Clone, Copy)]
pub(super) enum KernelArgument {
    /// A pointer or a 64-bit number.
    U64(u64),
    /// A 32-bit number.
    U32(u32),
}

/// Words in the GPU's own memory, freed on drop.
pub(super) struct DeviceBuffer<'a> {
    gpu: &'a Gpu,
    /// Address in the GPU's address space.
    pub address: Address,
    count: usize,
}

impl Drop for DeviceBuffer<'_> {
    fn drop(&mut self) {
        // SAFETY: `address` was allocated by `upload`, and the kernels that used it are complete. A failure cannot be
        // handled here.
        unsafe { (self.gpu.driver.free)(self.address) };
    }
}

/// A time stamp in the GPU's command stream.
struct Event<'a> {
    driver: &'a Driver,
    handle: Handle,
}

impl Event<'_> {
    /// Records the time when the GPU reaches this point.
    fn record(&self) -> Result<()> {
        // SAFETY: `handle` was created by `Gpu::event` and is destroyed only on drop; a null stream is the default
        // stream.
        let recorded = unsafe { (self.driver.event_record)(self.handle, ptr::null_mut()) };
        self.driver.check("cuEventRecord", recorded)
    }

    /// Waits until the GPU has reached this point.
    fn wait(&self) -> Result<()> {
        // SAFETY: `handle` was created by `Gpu::event` and is destroyed only on drop.
        self.driver.check("cuEventSynchronize", unsafe { (self.driver.event_synchronize)(self.handle) })
    }

    /// Returns the nanoseconds since another event; both must have been waited for.
    fn ns_since(&self, start: &Self) -> Result<f64> {
        let mut elapsed_ms = 0_f32;
        // SAFETY: both handles were created by `Gpu::event` and are destroyed only on drop; the output is writable.
        let measured = unsafe { (self.driver.event_elapsed)(&mut elapsed_ms, start.handle, self.handle) };
        self.driver.check("cuEventElapsedTime", measured)?;
        Ok(f64::from(elapsed_ms) * 1e6)
    }
}

impl Drop for Event<'_> {
    fn drop(&mut self) {
        // SAFETY: `handle` was created by `Gpu::event` and is not used after this. A failure cannot be handled here.
        unsafe { (self.driver.event_destroy)(self.handle) };
    }
}

impl Gpu {
    /// Opens the GPU number `index`.
    pub(super) fn open(index: u32) -> Result<Self> {
        let (library, name) = DRIVER.load()?;
        let driver = Driver::of(library, name)?;
        let (library, name) = COMPILER.load()?;
        let compiler = Compiler::of(library, name)?;
        // SAFETY: the only argument is a flag word, which must be 0.
        driver.check("cuInit", unsafe { (driver.init)(0) })?;
        let mut count = 0;
        // SAFETY: `count` is writable.
        driver.check("cuDeviceGetCount", unsafe { (driver.device_count)(&mut count) })?;
        if i64::from(index) >= i64::from(count) {
            return Error::wrong_use(format!(
                "cuda: there is no GPU {index}; this machine has {count}, from cuda:0 on"
            ));
        }
        let (mut device, mut context) = (0, ptr::null_mut());
        // SAFETY: the output is writable; `index` is below the number of devices.
        driver.check("cuDeviceGet", unsafe { (driver.device_get)(&mut device, index as c_int) })?;
        // SAFETY: the output is writable; `device` was returned by `cuDeviceGet`.
        driver.check("cuDevicePrimaryCtxRetain", unsafe { (driver.context_retain)(&mut context, device) })?;
        let mut gpu = Self {
            driver,
            compiler,
            device,
            context,
            module: ptr::null_mut(),
            words: 0,
            name: String::new(),
            pci_address: String::new(),
            processors: 0,
            processor_threads: 0,
        };
        gpu.name = gpu.driver.text_of("cuDeviceGetName", gpu.driver.device_name, device)?;
        gpu.pci_address = gpu.driver.text_of("cuDeviceGetPCIBusId", gpu.driver.device_pci_address, device)?;
        gpu.processors = gpu.driver.attribute(device, ATTRIBUTE_PROCESSORS)?;
        gpu.processor_threads = gpu.driver.attribute(device, ATTRIBUTE_PROCESSOR_THREADS)?;
        Ok(gpu)
    }

    /// Compiles `source` for this GPU, with the macro `WORDS` defined as `words`, and loads it in place of the previous
    /// module, unless that was compiled for the same number.
    pub(super) fn load(&mut self, source: &CStr, words: u32) -> Result<()> {
        if self.words == words {
            return Ok(());
        }
        let attribute = |attribute| self.driver.attribute(self.device, attribute);
        let capability = (attribute(ATTRIBUTE_MAJOR)?, attribute(ATTRIBUTE_MINOR)?);
        let ptx = self.compiler.ptx_of(source, capability, words)?;
        self.make_current()?;
        if self.words != 0 {
            // SAFETY: `module` was loaded by an earlier call, and no kernel runs, because `launch` waits for its
            // kernel.
            self.driver.check("cuModuleUnload", unsafe { (self.driver.module_unload)(self.module) })?;
            self.words = 0;
        }
        // SAFETY: the text ends with a NUL byte and outlives the call; the output is writable.
        let loaded = unsafe { (self.driver.module_load)(&mut self.module, ptx.as_ptr().cast()) };
        self.driver.check("cuModuleLoadData", loaded)?;
        self.words = words;
        Ok(())
    }

    fn make_current(&self) -> Result<()> {
        // SAFETY: the context is retained until drop.
        self.driver.check("cuCtxSetCurrent", unsafe { (self.driver.context_set)(self.context) })
    }

    /// Allocates pinned memory of the host, which the host caches as it caches other memory.
    pub(super) fn pin(&self, bytes: usize) -> Result<PinnedBuffer> {
        self.make_current()?;
        let (mut host, mut address) = (ptr::null_mut(), 0);
        // SAFETY: the output is writable.
        let pinned = unsafe { (self.driver.host_alloc)(&mut host, bytes, HOST_ALLOC_DEVICE_MAP) };
        self.driver.check("cuMemHostAlloc", pinned)?;
        // SAFETY: the output is writable, and `host` was allocated by the call before with the flag that maps it.
        let mapped = unsafe { (self.driver.host_device_pointer)(&mut address, host, 0) };
        let pinned = PinnedBuffer { host: host.cast(), address };
        if let Err(error) = self.driver.check("cuMemHostGetDevicePointer", mapped) {
            self.unpin(&pinned);
            return Err(error);
        }
        Ok(pinned)
    }

    /// Frees pinned memory.
    pub(super) fn unpin(&self, pinned: &PinnedBuffer) {
        let _ = self.make_current();
        // SAFETY: `host` was allocated by `pin`, and the callers drop `pinned` after this. A failure cannot be handled
        // here.
        unsafe { (self.driver.host_free)(pinned.host.cast()) };
    }

    /// Copies words to the GPU's own memory.
    pub(super) fn upload(&self, words: &[u64]) -> Result<DeviceBuffer<'_>> {
        self.make_current()?;
        let mut address = 0;
        let bytes = size_of_val(words).max(1);
        // SAFETY: the output is writable.
        self.driver.check("cuMemAlloc", unsafe { (self.driver.alloc)(&mut address, bytes) })?;
        let uploaded = DeviceBuffer { gpu: self, address, count: words.len() };
        // SAFETY: the source has `size_of_val(words)` bytes, and at least as many were allocated at `address`.
        let copied = unsafe { (self.driver.copy_in)(address, words.as_ptr().cast(), size_of_val(words)) };
        self.driver.check("cuMemcpyHtoD", copied)?;
        Ok(uploaded)
    }

    /// Copies words back from the GPU's memory.
    pub(super) fn download(&self, uploaded: &DeviceBuffer<'_>) -> Result<Vec<u64>> {
        self.make_current()?;
        let mut words = vec![0_u64; uploaded.count];
        let bytes = size_of_val(&words[..]);
        // SAFETY: the destination has `bytes` bytes, and `upload` allocated `count` words at the source.
        let copied = unsafe { (self.driver.copy_out)(words.as_mut_ptr().cast(), uploaded.address, bytes) };
        self.driver.check("cuMemcpyDtoH", copied)?;
        Ok(words)
    }

    /// Runs a kernel to completion and returns the nanoseconds between the events before and after it.
    pub(super) fn launch(&self, kernel: &CStr, blocks: u32, threads: u32, arguments: &[KernelArgument]) -> Result<f64> {
        self.make_current()?;
        let mut function = ptr::null_mut();
        // SAFETY: `load` has loaded the module, the name ends with a NUL byte, and the output is writable.
        let found = unsafe { (self.driver.module_function)(&mut function, self.module, kernel.as_ptr()) };
        self.driver.check("cuModuleGetFunction", found)?;
        let (start, end) = (self.event()?, self.event()?);
        // The driver copies each argument at launch, with the size in the kernel's signature.
        let mut values: Vec<[u8; 8]> = arguments.iter().map(|argument| argument.bytes()).collect();
        let mut pointers: Vec<*mut c_void> = values.iter_mut().map(|value| value.as_mut_ptr().cast()).collect();
        start.record()?;
        let (pointers, none) = (pointers.as_mut_ptr(), ptr::null_mut());
        // SAFETY: all calls are in this module's parent, with the argument types of the kernels in `kernels.cu`. The
        // pointers outlive the call. The GPU buffers outlive the kernel, because this function waits for its
        // completion.
        let launched =
            unsafe { (self.driver.launch)(function, blocks, 1, 1, threads, 1, 1, 0, ptr::null_mut(), pointers, none) };
        self.driver.check(&format!("kernel {}", kernel.to_string_lossy()), launched)?;
        let ended = end.record().and_then(|()| end.wait());
        // SAFETY: the function has no arguments. It reports errors of the kernel, and after it no kernel runs, whether
        // or not the calls before it failed.
        let synchronised = self.driver.check("cuCtxSynchronize", unsafe { (self.driver.synchronize)() });
        ended.and(synchronised)?;
        end.ns_since(&start)
    }

    /// Creates an event.
    fn event(&self) -> Result<Event<'_>> {
        let mut handle = ptr::null_mut();
        // SAFETY: the output is writable.
        let made = unsafe { (self.driver.event_create)(&mut handle, EVENT_DEFAULT) };
        self.driver.check("cuEventCreate", made)?;
        Ok(Event { driver: &self.driver, handle })
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: `open` retained the context, and nothing uses it after this. The driver unloads the module with the
        // context.
        unsafe { (self.driver.context_release)(self.device) };
    }
}

impl KernelArgument {
    /// Returns the bytes in native order; a `U32` occupies the first four.
    fn bytes(self) -> [u8; 8] {
        match self {
            Self::U64(value) => value.to_ne_bytes(),
            Self::U32(value) => {
                let mut bytes = [0; 8];
                bytes[..4].copy_from_slice(&value.to_ne_bytes());
                bytes
            }
        }
    }
}

impl Driver {
    fn check(&self, what: &str, code: c_int) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let mut name = ptr::null();
        // SAFETY: the output is writable; the driver sets it to a static string or to null.
        unsafe { (self.error_name)(code, &mut name) };
        let name = if name.is_null() {
            "unknown".into()
        } else {
            // SAFETY: a pointer that is not null is to a static string of the library, which ends with a NUL byte, and
            // `self` keeps the library loaded.
            unsafe { CStr::from_ptr(name) }.to_string_lossy()
        };
        Error::failed(format!("cuda: {what} failed with {code} ({name})"))
    }

    /// Returns the text that a function of the driver writes about a device.
    fn text_of(
        &self,
        what: &str,
        function: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int,
        device: c_int,
    ) -> Result<String> {
        let mut text = [0 as c_char; 256];
        // SAFETY: the buffer has one byte more than the length given, so that its last byte stays NUL.
        let code = unsafe { function(text.as_mut_ptr(), text.len() as c_int - 1, device) };
        self.check(what, code)?;
        // SAFETY: the last byte of `text` is NUL.
        Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
    }

    fn attribute(&self, device: c_int, attribute: c_int) -> Result<u32> {
        let mut value = 0;
        // SAFETY: the output is writable.
        self.check("cuDeviceGetAttribute", unsafe { (self.device_attribute)(&mut value, attribute, device) })?;
        Ok(value.unsigned_abs())
    }
}

impl Compiler {
    /// Compiles for a compute capability, with `WORDS` defined, and returns PTX that ends with a NUL byte.
    fn ptx_of(&self, source: &CStr, (major, minor): (u32, u32), words: u32) -> Result<Vec<u8>> {
        let mut program = ptr::null_mut();
        // SAFETY: both strings end with a NUL byte, the number of headers is 0, and the output is writable.
        let created = unsafe {
            (self.create)(&mut program, source.as_ptr(), c"kernels.cu".as_ptr(), 0, ptr::null(), ptr::null())
        };
        if created != 0 {
            return Error::failed(format!("cuda: nvrtcCreateProgram failed with {created}"));
        }
        let options = [format!("--gpu-architecture=compute_{major}{minor}"), format!("--define-macro=WORDS={words}")];
        let options = options.map(|option| CString::new(option).unwrap_or_default());
        let pointers = options.each_ref().map(|option| option.as_ptr());
        // SAFETY: `program` was created above; the array has `pointers.len()` strings, which outlive the call.
        let compiled = unsafe { (self.compile)(program, pointers.len() as c_int, pointers.as_ptr()) };
        let text = if compiled == 0 {
            self.text(program, self.ptx_size, self.ptx)
        } else {
            let log = self.text(program, self.log_size, self.log);
            let log = String::from_utf8_lossy(&log).replace(['\n', '\0'], " ");
            // SAFETY: `program` was created above and is not used after this.
            unsafe { (self.destroy)(&mut program) };
            return Error::failed(format!("cuda: the kernels do not compile for compute_{major}{minor}: {log}"));
        };
        // SAFETY: `program` was created above and is not used after this.
        unsafe { (self.destroy)(&mut program) };
        if text.is_empty() { Error::failed("cuda: the compiler returned no code") } else { Ok(text) }
    }

    /// Returns a text of the compiler, of which one function returns the size and another the bytes.
    fn text(
        &self,
        program: Handle,
        size: unsafe extern "C" fn(Handle, *mut usize) -> c_int,
        get: unsafe extern "C" fn(Handle, *mut c_char) -> c_int,
    ) -> Vec<u8> {
        let mut bytes = 0;
        // SAFETY: `ptx_of` destroys `program` only after it has the texts, and the output is writable.
        if unsafe { size(program, &mut bytes) } != 0 {
            return Vec::new();
        }
        let mut text = vec![0_u8; bytes + 1];
        // SAFETY: the buffer has one byte more than the size that the compiler returned for `program`.
        if unsafe { get(program, text.as_mut_ptr().cast()) } == 0 { text } else { Vec::new() }
    }
}
