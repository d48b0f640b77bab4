//! As much of libcuda and NVRTC as the benchmark needs, loaded at run time.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr;

use libloading::Library;

use crate::error::{Error, Result};

const DRIVER: Needed =
    Needed { names: &["libcuda.so.1"], remedy: "it comes with NVIDIA's driver; without a GPU choose another device" };
/// Every version has the few functions needed.
const COMPILER: Needed = Needed {
    names: &["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11.2"],
    remedy: "install NVIDIA's run-time compiler (package libnvrtc)",
};

/// `CU_MEMHOSTALLOC_DEVICEMAP`: the GPU sees the memory.
const HOST_ALLOC_DEVICE_MAP: c_uint = 2;
const ATTRIBUTE_MAJOR: c_int = 75;
const ATTRIBUTE_MINOR: c_int = 76;
const ATTRIBUTE_PROCESSORS: c_int = 16;
const ATTRIBUTE_PROCESSOR_THREADS: c_int = 39;
const EVENT_DEFAULT: c_uint = 0;

type Handle = *mut c_void;
type Address = u64;

/// A function of a library by its name.
fn symbol<T: Copy>(library: &Library, library_name: &str, name: &str) -> Result<T> {
    // SAFETY: each caller names the type that the library's manual gives the function; a plain function pointer is
    // copied out, and the library stays loaded as long as the struct that holds it.
    let found = unsafe { library.get::<T>(name.as_bytes()) };
    found
        .map(|function| *function)
        .map_err(|_| Error::Failed(format!("cuda: {library_name} lacks {name}: it is too old")))
}

/// A library that the device loads.
#[derive(Clone, Copy, Debug)]
pub struct Needed {
    /// The names under which it is looked for, one after the other.
    names: &'static [&'static str],
    /// What to do where it is missing.
    pub remedy: &'static str,
}

impl Needed {
    /// All, in the order in which they are loaded.
    pub const ALL: [Self; 2] = [DRIVER, COMPILER];

    /// The name by which messages call it.
    pub fn name(&self) -> &'static str {
        self.names[0]
    }

    /// The name under which this machine has it, if it can be loaded.
    pub fn found(&self) -> Option<&'static str> {
        self.load().ok().map(|(_, name)| name)
    }

    fn load(&self) -> Result<(Library, &'static str)> {
        for name in self.names {
            // SAFETY: NVIDIA's libraries may be loaded at any time; their initialisers touch nothing of ours.
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
    /// The driver's.
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
    /// The run-time compiler's.
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
    /// The kernels last compiled, and for transfers of how many words; 0 before.
    module: Handle,
    words: u32,
    /// As the driver calls it.
    pub name: String,
    /// Where it is on the bus, as in `0000:B7:00.0`.
    pub pci_address: String,
    /// Its multiprocessors.
    pub processors: u32,
    /// Threads that each of them holds at a time.
    pub processor_threads: u32,
}

// SAFETY: the driver's functions may be called from any thread once the context is current there, which every method
// that needs it sees to.
unsafe impl Send for Gpu {}

/// Pinned memory of the host that the GPU sees.
pub(super) struct Pinned {
    /// Where the host sees it.
    pub host: *mut u8,
    /// Where the GPU sees it.
    pub address: Address,
}

// SAFETY: plain memory; it is reached through volatile accesses and copies alone.
unsafe impl Send for Pinned {}

/// An argument of a kernel.
#[derive(Clone, Copy)]
pub(super) enum Argument {
    /// A pointer or a 64-bit number.
    Wide(u64),
    /// A 32-bit number.
    Narrow(u32),
}

/// Words in the GPU's own memory; they are freed with this.
pub(super) struct Words<'a> {
    gpu: &'a Gpu,
    /// Where the GPU sees them.
    pub address: Address,
    count: usize,
}

impl Drop for Words<'_> {
    fn drop(&mut self) {
        // SAFETY: allocated by `upload`, used no more. There is nothing to do about a failure.
        unsafe { (self.gpu.driver.free)(self.address) };
    }
}

/// A point in the GPU's work whose time is taken.
struct Event<'a> {
    driver: &'a Driver,
    handle: Handle,
}

impl Event<'_> {
    /// Takes the time when the GPU gets here.
    fn record(&self) -> Result<()> {
        // SAFETY: the event exists; the stream is the default one.
        let recorded = unsafe { (self.driver.event_record)(self.handle, ptr::null_mut()) };
        self.driver.check("cuEventRecord", recorded)
    }

    /// Waits until the GPU has got here.
    fn wait(&self) -> Result<()> {
        // SAFETY: the event exists.
        self.driver.check("cuEventSynchronize", unsafe { (self.driver.event_synchronize)(self.handle) })
    }

    /// Nanoseconds since another event; both have been waited for.
    fn ns_since(&self, start: &Self) -> Result<f64> {
        let mut elapsed_ms = 0_f32;
        // SAFETY: both events exist, and the output is writable.
        let told = unsafe { (self.driver.event_elapsed)(&mut elapsed_ms, start.handle, self.handle) };
        self.driver.check("cuEventElapsedTime", told)?;
        Ok(f64::from(elapsed_ms) * 1e6)
    }
}

impl Drop for Event<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `Gpu::event`, used no more. There is nothing to do about a failure.
        unsafe { (self.driver.event_destroy)(self.handle) };
    }
}

impl Gpu {
    /// Opens the GPU number `index`.
    pub(super) fn open(index: u32) -> Result<Self> {
        let (library_driver, name) = DRIVER.load()?;
        let driver = Driver::of(library_driver, name)?;
        let (library_compiler, name) = COMPILER.load()?;
        let compiler = Compiler::of(library_compiler, name)?;
        // SAFETY: no arguments but flags.
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
        // SAFETY: the output is writable; the device is one of those counted.
        driver.check("cuDeviceGet", unsafe { (driver.device_get)(&mut device, index as c_int) })?;
        // SAFETY: the output is writable; the device is one that the driver named.
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

    /// Compiles `source` for this GPU, with `WORDS` defined as a number, and loads it in place of what was loaded,
    /// unless that was it.
    pub(super) fn load(&mut self, source: &CStr, words: u32) -> Result<()> {
        if self.words == words {
            return Ok(());
        }
        let attribute = |attribute| self.driver.attribute(self.device, attribute);
        let capability = (attribute(ATTRIBUTE_MAJOR)?, attribute(ATTRIBUTE_MINOR)?);
        let ptx = self.compiler.ptx_of(source, capability, words)?;
        self.make_current()?;
        if self.words != 0 {
            // SAFETY: loaded below, and no kernel runs: every launch is waited for.
            self.driver.check("cuModuleUnload", unsafe { (self.driver.module_unload)(self.module) })?;
            self.words = 0;
        }
        // SAFETY: the text ends with a zero and outlives the call; the output is writable.
        let loaded = unsafe { (self.driver.module_load)(&mut self.module, ptx.as_ptr().cast()) };
        self.driver.check("cuModuleLoadData", loaded)?;
        self.words = words;
        Ok(())
    }

    fn make_current(&self) -> Result<()> {
        // SAFETY: the context is retained until drop.
        self.driver.check("cuCtxSetCurrent", unsafe { (self.driver.context_set)(self.context) })
    }

    /// Memory of the host, pinned, cached there as plain memory is.
    pub(super) fn pin(&self, bytes: usize) -> Result<Pinned> {
        self.make_current()?;
        let (mut host, mut address) = (ptr::null_mut(), 0);
        // SAFETY: outputs are writable.
        let pinned = unsafe { (self.driver.host_alloc)(&mut host, bytes, HOST_ALLOC_DEVICE_MAP) };
        self.driver.check("cuMemHostAlloc", pinned)?;
        // SAFETY: as above; the memory was mapped for the device.
        let mapped = unsafe { (self.driver.host_device_pointer)(&mut address, host, 0) };
        let pinned = Pinned { host: host.cast(), address };
        if let Err(error) = self.driver.check("cuMemHostGetDevicePointer", mapped) {
            self.unpin(&pinned);
            return Err(error);
        }
        Ok(pinned)
    }

    /// Gives pinned memory back.
    pub(super) fn unpin(&self, pinned: &Pinned) {
        let _ = self.make_current();
        // SAFETY: allocated by `pin`; the caller uses it no more. There is nothing to do about a failure.
        unsafe { (self.driver.host_free)(pinned.host.cast()) };
    }

    /// Words in the GPU's own memory.
    pub(super) fn upload(&self, words: &[u64]) -> Result<Words<'_>> {
        self.make_current()?;
        let mut address = 0;
        let bytes = size_of_val(words).max(1);
        // SAFETY: the output is writable.
        self.driver.check("cuMemAlloc", unsafe { (self.driver.alloc)(&mut address, bytes) })?;
        let uploaded = Words { gpu: self, address, count: words.len() };
        // SAFETY: source and destination have `bytes` bytes.
        let copied = unsafe { (self.driver.copy_in)(address, words.as_ptr().cast(), size_of_val(words)) };
        self.driver.check("cuMemcpyHtoD", copied)?;
        Ok(uploaded)
    }

    /// Reads words back.
    pub(super) fn download(&self, uploaded: &Words<'_>) -> Result<Vec<u64>> {
        self.make_current()?;
        let mut words = vec![0_u64; uploaded.count];
        let bytes = size_of_val(&words[..]);
        // SAFETY: the destination has as many bytes, and so has the source.
        let copied = unsafe { (self.driver.copy_out)(words.as_mut_ptr().cast(), uploaded.address, bytes) };
        self.driver.check("cuMemcpyDtoH", copied)?;
        Ok(words)
    }

    /// Runs a kernel to its end and returns the nanoseconds between the events around it.
    pub(super) fn launch(&self, kernel: &CStr, blocks: u32, threads: u32, arguments: &[Argument]) -> Result<f64> {
        self.make_current()?;
        let mut function = ptr::null_mut();
        // SAFETY: the module is loaded, the name ends with a zero, the output is writable.
        let found = unsafe { (self.driver.module_function)(&mut function, self.module, kernel.as_ptr()) };
        self.driver.check("cuModuleGetFunction", found)?;
        let (start, end) = (self.event()?, self.event()?);
        // The driver copies each argument at launch, as many bytes as the kernel's signature says.
        let mut values: Vec<[u8; 8]> = arguments.iter().map(|argument| argument.bytes()).collect();
        let mut pointers: Vec<*mut c_void> = values.iter_mut().map(|value| value.as_mut_ptr().cast()).collect();
        start.record()?;
        let (pointers, none) = (pointers.as_mut_ptr(), ptr::null_mut());
        // SAFETY: arguments match the kernels of `kernels.cu`, whose callers are in this crate; the pointers outlive
        // the call, and what they point to in the GPU is freed after the synchronisation below, or by calls that wait.
        let launched =
            unsafe { (self.driver.launch)(function, blocks, 1, 1, threads, 1, 1, 0, ptr::null_mut(), pointers, none) };
        self.driver.check(&format!("kernel {}", kernel.to_string_lossy()), launched)?;
        let ended = end.record().and_then(|()| end.wait());
        // SAFETY: no arguments. Errors of the kernel itself come to light here. Nothing runs afterwards, whatever
        // failed.
        let synchronised = self.driver.check("cuCtxSynchronize", unsafe { (self.driver.synchronize)() });
        ended.and(synchronised)?;
        end.ns_since(&start)
    }

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
        // SAFETY: retained by `open`; the module goes with the context.
        unsafe { (self.driver.context_release)(self.device) };
    }
}

impl Argument {
    /// In the machine's order, so that a narrow one fills the first four bytes.
    fn bytes(self) -> [u8; 8] {
        match self {
            Self::Wide(value) => value.to_ne_bytes(),
            Self::Narrow(value) => {
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
        // SAFETY: the output is writable; the driver sets it to a constant string or to null.
        unsafe { (self.error_name)(code, &mut name) };
        let name = if name.is_null() {
            "unknown".into()
        } else {
            // SAFETY: not null, so a string that ends with a zero and lives as long as the library.
            unsafe { CStr::from_ptr(name) }.to_string_lossy()
        };
        Error::failed(format!("cuda: {what} failed with {code} ({name})"))
    }

    /// What a function of the driver writes about a device.
    fn text_of(
        &self,
        what: &str,
        function: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int,
        device: c_int,
    ) -> Result<String> {
        let mut text = [0 as c_char; 256];
        // SAFETY: the buffer has the length given, less the zero that stays at its end.
        let code = unsafe { function(text.as_mut_ptr(), text.len() as c_int - 1, device) };
        self.check(what, code)?;
        // SAFETY: the last byte is zero.
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
    /// Compiles for a compute capability, with `WORDS` defined; the text ends with a zero.
    fn ptx_of(&self, source: &CStr, (major, minor): (u32, u32), words: u32) -> Result<Vec<u8>> {
        let mut program = ptr::null_mut();
        // SAFETY: both strings end with a zero; there are no headers; the output is writable.
        let created = unsafe {
            (self.create)(&mut program, source.as_ptr(), c"kernels.cu".as_ptr(), 0, ptr::null(), ptr::null())
        };
        if created != 0 {
            return Error::failed(format!("cuda: nvrtcCreateProgram failed with {created}"));
        }
        let options = [format!("--gpu-architecture=compute_{major}{minor}"), format!("--define-macro=WORDS={words}")];
        let options = options.map(|option| CString::new(option).unwrap_or_default());
        let pointers = options.each_ref().map(|option| option.as_ptr());
        // SAFETY: the program exists, and so many options are given that outlive the call.
        let compiled = unsafe { (self.compile)(program, pointers.len() as c_int, pointers.as_ptr()) };
        let text = if compiled == 0 {
            self.text(program, self.ptx_size, self.ptx)
        } else {
            let log = self.text(program, self.log_size, self.log);
            let log = String::from_utf8_lossy(&log).replace(['\n', '\0'], " ");
            // SAFETY: created above.
            unsafe { (self.destroy)(&mut program) };
            return Error::failed(format!("cuda: the kernels do not compile for compute_{major}{minor}: {log}"));
        };
        // SAFETY: created above, used no more.
        unsafe { (self.destroy)(&mut program) };
        if text.is_empty() { Error::failed("cuda: the compiler gave no code") } else { Ok(text) }
    }

    fn text(
        &self,
        program: Handle,
        size: unsafe extern "C" fn(Handle, *mut usize) -> c_int,
        get: unsafe extern "C" fn(Handle, *mut c_char) -> c_int,
    ) -> Vec<u8> {
        let mut bytes = 0;
        // SAFETY: the program exists and the output is writable.
        if unsafe { size(program, &mut bytes) } != 0 {
            return Vec::new();
        }
        let mut text = vec![0_u8; bytes + 1];
        // SAFETY: the buffer has the bytes asked for, and one more.
        if unsafe { get(program, text.as_mut_ptr().cast()) } == 0 { text } else { Vec::new() }
    }
}
