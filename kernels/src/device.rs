//! One GPU: its context and stream, every kernel of every image, and launching.
//!
//! The driver is opened when a device is; a machine without one gets a clear error.

#![allow(unsafe_code, reason = "driver calls")]

use std::{
    collections::HashMap,
    ffi::{CStr, c_char, c_void},
    fmt,
    sync::Arc,
};

use cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, DevicePtr as _, DeviceRepr, DriverError, ValidAsZeroBits,
    sys::{self, CUdevice_attribute as Attribute, CUfunction_attribute as FunctionAttribute},
};

use crate::{IMAGES, Image, TARGETS, abi::DevicePtr, mark::Mark};

/// The oldest driver whose calls are used, as the driver counts them.
const MIN_DRIVER: i32 = 13000;

/// Why a device cannot be used, or a call failed.
#[derive(Debug)]
pub enum DeviceError {
    /// Built without nvcc.
    NoKernels,
    /// No driver library on this machine.
    NoDriver,
    /// The driver is too old.
    OldDriver {
        /// Its version, 1000 a major and 10 a minor.
        found: i32,
    },
    /// The images have no code for this card.
    UnknownCard {
        /// Its name.
        name: String,
        /// Its compute capability.
        capability: (i32, i32),
    },
    /// No image has this kernel.
    NoKernel(String),
    /// A driver call failed.
    Driver {
        /// What was being done.
        doing: String,
        /// What the driver said.
        error: DriverError,
    },
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoKernels => write!(
                f,
                "built without GPU kernels: set MARATHON_NVCC to where nvcc is and build again"
            ),
            Self::NoDriver => write!(f, "no NVIDIA driver (libcuda) on this machine"),
            Self::OldDriver { found } => write!(
                f,
                "the NVIDIA driver supports CUDA {}.{}; {}.0 or newer is needed",
                found / 1000,
                found % 1000 / 10,
                MIN_DRIVER / 1000
            ),
            Self::UnknownCard {
                name,
                capability: (major, minor),
            } => write!(
                f,
                "{name} has compute capability {major}.{minor}; there are kernels for {}",
                TARGETS
                    .iter()
                    .map(|(a, b)| format!("{a}.{b}"))
                    .collect::<Vec<_>>()
                    .join(", ")
            ),
            Self::NoKernel(name) => write!(f, "no image has a kernel {name}"),
            Self::Driver { doing, error } => write!(f, "{doing}: {error}"),
        }
    }
}

impl std::error::Error for DeviceError {}

/// Says what was being done when a driver call failed.
trait Doing<T> {
    fn doing(self, what: &str) -> Result<T, DeviceError>;
}

impl<T> Doing<T> for Result<T, DriverError> {
    fn doing(self, what: &str) -> Result<T, DeviceError> {
        self.map_err(|error| DeviceError::Driver {
            doing: what.to_owned(),
            error,
        })
    }
}

/// Device memory for elements of type `T`.
pub type Buffer<T> = CudaSlice<T>;

/// Which of a device's two streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lane {
    /// The one that all work goes through.
    Main,
    /// Beside it, between [`Device::fork`] and [`Device::join`].
    Side,
}

/// A grid of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Blocks in each direction.
    pub blocks: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory, bytes.
    pub shared: usize,
}

#[derive(Clone, Copy)]
struct Kernel(sys::CUfunction);
struct Module(sys::CUmodule);

// SAFETY: handles of the driver, which takes them from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}
// SAFETY: as above.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// One GPU with all kernels loaded.
pub struct Device {
    // Where the side stream begins, and where it ends; they go before the context does.
    forked: Mark,
    joined: Mark,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    side: Arc<CudaStream>,
    kernels: HashMap<String, Kernel>,
    modules: Vec<Module>,
    /// The card's name.
    pub name: String,
    /// Multiprocessors.
    pub sms: usize,
    /// Clusters of eight blocks that run at a time, a block a multiprocessor: fewer than an eighth
    /// of the multiprocessors where these come in groups that eight does not divide.
    pub clusters: usize,
    /// Shared memory of a multiprocessor, bytes.
    pub shared_per_sm: usize,
    /// The driver's version, 1000 a major and 10 a minor.
    pub driver: i32,
}

impl Device {
    /// Opens the card of this number and loads every kernel.
    pub fn open(ordinal: usize) -> Result<Self, DeviceError> {
        if !crate::present() {
            return Err(DeviceError::NoKernels);
        }
        Self::open_with(ordinal, IMAGES)
    }

    /// Opens the card of this number and loads the kernels of these images.
    pub fn open_with(ordinal: usize, images: &[Image]) -> Result<Self, DeviceError> {
        // SAFETY: looks for the library; nothing is called.
        if !unsafe { sys::is_culib_present() } {
            return Err(DeviceError::NoDriver);
        }
        let mut driver = 0;
        // SAFETY: writes one integer.
        unsafe { sys::cuDriverGetVersion(&mut driver) }
            .result()
            .doing("asking the version")?;
        if driver < MIN_DRIVER {
            return Err(DeviceError::OldDriver { found: driver });
        }
        let context = CudaContext::new(ordinal).doing("creating the context")?;
        // SAFETY: all work of a device goes through its one stream.
        unsafe { context.disable_event_tracking() };
        let name = context.name().doing("asking the name")?;
        let capability = context
            .compute_capability()
            .doing("asking the capability")?;
        if !TARGETS
            .iter()
            .any(|(a, b)| (*a as i32, *b as i32) == capability)
        {
            return Err(DeviceError::UnknownCard { name, capability });
        }
        let ask = |attribute| context.attribute(attribute).doing("asking an attribute");
        let sms = ask(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as usize;
        let shared_per_sm =
            ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)? as usize;
        let per_block = ask(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let stream = context.new_stream().doing("creating the stream")?;
        let side = context.new_stream().doing("creating the side stream")?;
        let (forked, joined) = (Mark::new()?, Mark::new()?);
        let mut kernels = HashMap::new();
        let mut modules = Vec::new();
        for image in images {
            let module = load(image.fatbin).doing(&format!("loading {}", image.unit))?;
            for (name, kernel) in functions(module).doing(image.unit)? {
                allow_shared(kernel, per_block).doing(&name)?;
                kernels.insert(name, Kernel(kernel));
            }
            modules.push(Module(module));
        }
        let clusters = match kernels.get("linear_bf16_m8") {
            Some(Kernel(kernel)) => {
                clusters_at_once(*kernel, per_block as u32).doing("asking for clusters")?
            }
            None => sms / 8,
        };
        Ok(Self {
            context,
            stream,
            side,
            forked,
            joined,
            kernels,
            modules,
            name,
            sms,
            clusters,
            shared_per_sm,
            driver,
        })
    }

    /// Makes the device the calling thread's own. Needed once on every thread that uses it, except
    /// the one that opened it.
    pub fn bind(&self) -> Result<(), DeviceError> {
        self.context
            .bind_to_thread()
            .doing("binding a thread to the card")
    }

    /// The context.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Lets the side stream begin behind all work of the main one so far.
    pub fn fork(&self) -> Result<(), DeviceError> {
        self.forked.order(&self.stream, &self.side)
    }

    /// Lets the main stream go on behind all work of the side one so far.
    pub fn join(&self) -> Result<(), DeviceError> {
        self.joined.order(&self.side, &self.stream)
    }

    /// The stream that all work goes through.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Names of all kernels.
    pub fn kernels(&self) -> impl Iterator<Item = &str> {
        self.kernels.keys().map(String::as_str)
    }

    /// Memory with these elements.
    pub fn upload<T: DeviceRepr>(&self, data: &[T]) -> Result<Buffer<T>, DeviceError> {
        self.stream.clone_htod(data).doing("copying to the card")
    }

    /// Zeroed memory.
    pub fn zeros<T: DeviceRepr + ValidAsZeroBits>(
        &self,
        len: usize,
    ) -> Result<Buffer<T>, DeviceError> {
        self.stream.alloc_zeros(len).doing("allocating")
    }

    /// What the memory holds once all earlier work is done.
    pub fn download<T: DeviceRepr + Clone + Default>(
        &self,
        buffer: &Buffer<T>,
    ) -> Result<Vec<T>, DeviceError> {
        let data = self
            .stream
            .clone_dtoh(buffer)
            .doing("copying from the card")?;
        self.wait()?;
        Ok(data)
    }

    /// Address of a buffer.
    pub fn address<T>(&self, buffer: &Buffer<T>) -> DevicePtr {
        buffer.device_ptr(&self.stream).0
    }

    /// Waits for all work.
    pub fn wait(&self) -> Result<(), DeviceError> {
        self.stream.synchronize().doing("waiting for the card")
    }

    /// Launches a kernel behind all earlier work. Where `dependent`, it may start before the
    /// kernel in front of it ends; every kernel waits itself before it reads what others wrote.
    ///
    /// # Safety
    /// `args` is the kernel's own parameter block, and its addresses are those of live buffers
    /// that are large enough.
    pub unsafe fn launch<A: Copy>(
        &self,
        kernel: &str,
        grid: Grid,
        args: &A,
        dependent: bool,
    ) -> Result<(), DeviceError> {
        // SAFETY: the caller's word.
        unsafe { self.launch_in(Lane::Main, kernel, grid, args, dependent) }
    }

    /// The same in either stream. The first kernel behind a fork or a join is not `dependent`.
    ///
    /// # Safety
    /// As [`Device::launch`] says.
    pub unsafe fn launch_in<A: Copy>(
        &self,
        lane: Lane,
        kernel: &str,
        grid: Grid,
        args: &A,
        dependent: bool,
    ) -> Result<(), DeviceError> {
        let stream = match lane {
            Lane::Main => &self.stream,
            Lane::Side => &self.side,
        };
        let Kernel(function) = *self
            .kernels
            .get(kernel)
            .ok_or_else(|| DeviceError::NoKernel(kernel.to_owned()))?;
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue {
                programmaticStreamSerializationAllowed: 1,
            },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: grid.blocks[0],
            gridDimY: grid.blocks[1],
            gridDimZ: grid.blocks[2],
            blockDimX: grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared as u32,
            hStream: stream.cu_stream(),
            attrs: &mut attribute,
            numAttrs: u32::from(dependent),
        };
        let mut copy = *args;
        let mut params = [(&raw mut copy).cast::<c_void>()];
        // SAFETY: the driver copies the parameter block before it returns; the rest is the
        // caller's word.
        unsafe {
            sys::cuLaunchKernelEx(&config, function, params.as_mut_ptr(), std::ptr::null_mut())
        }
        .result()
        .doing(kernel)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // A failure here means that the context is gone already, and the modules with it.
        let _ = self
            .context
            .bind_to_thread()
            .and_then(|()| self.stream.synchronize());
        self.kernels.clear();
        for Module(module) in self.modules.drain(..) {
            // SAFETY: loaded by `open`, and no kernel of it is used any more.
            let _ = unsafe { sys::cuModuleUnload(module) };
        }
    }
}

fn load(fatbin: &[u8]) -> Result<sys::CUmodule, DriverError> {
    let mut module = std::ptr::null_mut();
    // SAFETY: a whole fatbin, made by nvcc at build time.
    unsafe { sys::cuModuleLoadData(&mut module, fatbin.as_ptr().cast()) }.result()?;
    Ok(module)
}

/// A module's kernels by name.
fn functions(module: sys::CUmodule) -> Result<Vec<(String, sys::CUfunction)>, DriverError> {
    let mut count = 0;
    // SAFETY: writes one integer.
    unsafe { sys::cuModuleGetFunctionCount(&mut count, module) }.result()?;
    let mut functions = vec![std::ptr::null_mut(); count as usize];
    // SAFETY: there is room for `count` handles.
    unsafe { sys::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, module) }.result()?;
    functions
        .into_iter()
        .map(|function| {
            let mut name: *const c_char = std::ptr::null();
            // SAFETY: the driver gives a string that lives as long as the module.
            unsafe { sys::cuFuncGetName(&mut name, function) }.result()?;
            // SAFETY: as above; it ends in a zero.
            Ok((
                unsafe { CStr::from_ptr(name) }
                    .to_string_lossy()
                    .into_owned(),
                function,
            ))
        })
        .collect()
}

/// Clusters of a kernel that run at a time where a block takes all the shared memory it can.
fn clusters_at_once(kernel: sys::CUfunction, per_block: u32) -> Result<usize, DriverError> {
    let config = sys::CUlaunchConfig {
        gridDimX: 8,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: 32,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: per_block,
        hStream: std::ptr::null_mut(),
        attrs: std::ptr::null_mut(),
        numAttrs: 0,
    };
    let mut count = 0;
    // SAFETY: writes one integer; the kernel's cluster size is its own.
    unsafe { sys::cuOccupancyMaxActiveClusters(&mut count, kernel, &config) }.result()?;
    Ok(count.max(1) as usize)
}

/// Lets a kernel use all the shared memory that a block can have.
fn allow_shared(kernel: sys::CUfunction, per_block: i32) -> Result<(), DriverError> {
    let mut fixed = 0;
    let size = FunctionAttribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
    // SAFETY: writes one integer.
    unsafe { sys::cuFuncGetAttribute(&mut fixed, size, kernel) }.result()?;
    let most = FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // SAFETY: a handle of a loaded module.
    unsafe { sys::cuFuncSetAttribute(kernel, most, per_block - fixed) }.result()
}
