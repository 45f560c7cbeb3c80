//! Memory and launches, with the first failure kept: operations return nothing, the executor asks
//! at the end.
//!
//! Without a device it only counts the memory that would be taken: how a model's needs are known
//! before its pools are sized.

#![allow(unsafe_code, reason = "kernel launches")]

use std::sync::Arc;

use marathon_kernels::{
    abi::{DevicePtr, YardstickArgs},
    device::{Buffer, Device, DeviceError, Grid, Lane},
};

use super::staging::{Extent, Staging};

/// Memory on the card; `at` stays the same for its life.
pub(super) struct Region {
    pub(super) at: DevicePtr,
    memory: Option<Buffer<u8>>,
}

impl Region {
    /// What it holds once all earlier work is done.
    pub(super) fn bytes(&self, device: &Device) -> Result<Vec<u8>, DeviceError> {
        let memory = self.memory.as_ref();
        memory.map_or(Ok(Vec::new()), |memory| device.download(memory))
    }
}

/// Multiprocessors, clusters of eight blocks that run at a time, shared memory of a multiprocessor.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) sms: usize,
    pub(super) clusters: usize,
    pub(super) shared_per_sm: usize,
}

/// Bytes of a piece of weights on its way.
pub(super) const PIECE: usize = 64 << 20;
/// Bytes of the landing: a piece, and its block scales behind it.
pub(super) const LANDING: usize = PIECE + PIECE / 8;

const COMMON: Shape = Shape {
    sms: 132,
    clusters: 15,
    shared_per_sm: 228 << 10,
};

/// A card, or a count of what it would hold.
pub(super) struct Card {
    device: Option<Arc<Device>>,
    /// Bytes taken so far.
    pub(super) taken: usize,
    failure: Option<DeviceError>,
    errors: Option<Region>,
    staging: Option<Staging>,
    /// Where pieces of weights stand until they are packed.
    landing: Option<Region>,
    lane: Lane,
    /// Nothing was launched yet behind a fork, a join or the beginning of a part.
    fresh: bool,
    /// Matrices are random numbers made on the card, whatever their files hold.
    pub(super) random: bool,
}

impl Card {
    pub(super) fn new(device: Option<Arc<Device>>) -> Self {
        Self {
            device,
            taken: 0,
            failure: None,
            errors: None,
            staging: None,
            landing: None,
            lane: Lane::Main,
            fresh: false,
            random: false,
        }
    }

    /// What launches are cut for; of a common card where there is none.
    pub(super) fn shape(&self) -> Shape {
        let device = self.device.as_ref();
        device.map_or(COMMON, |d| Shape {
            sms: d.sms,
            clusters: d.clusters,
            shared_per_sm: d.shared_per_sm,
        })
    }

    pub(super) fn device(&self) -> Option<&Arc<Device>> {
        self.device.as_ref()
    }

    /// What went wrong first since the last call.
    pub(super) fn take_failure(&mut self) -> Option<DeviceError> {
        self.failure.take()
    }

    /// A word that counts codes which no checkpoint may hold.
    pub(super) fn errors(&mut self) -> DevicePtr {
        if self.errors.is_none() {
            self.errors = Some(self.zeros(4));
        }
        self.errors.as_ref().map_or(0, |e| e.at)
    }

    /// How many there were.
    pub(super) fn bad_codes(&self) -> Result<u32, DeviceError> {
        let (Some(device), Some(errors)) = (&self.device, &self.errors) else {
            return Ok(0);
        };
        let word = errors.bytes(device)?;
        Ok(word[..4]
            .iter()
            .rev()
            .fold(0, |n, b| n << 8 | u32::from(*b)))
    }

    fn keep<T>(&mut self, result: Result<T, DeviceError>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                self.failure.get_or_insert(error);
                None
            }
        }
    }

    fn region(&mut self, bytes: usize, memory: Option<Buffer<u8>>) -> Region {
        // The driver hands out whole steps of 512 bytes.
        self.taken += bytes.next_multiple_of(512);
        let at = match (&self.device, &memory) {
            (Some(device), Some(memory)) => device.address(memory),
            _ => 0,
        };
        Region { at, memory }
    }

    /// Zeroed memory.
    pub(super) fn zeros(&mut self, bytes: usize) -> Region {
        let made = self.device.clone().map(|d| d.zeros::<u8>(bytes.max(16)));
        let memory = made.and_then(|made| self.keep(made));
        self.region(bytes, memory)
    }

    /// Memory with these bytes; they are made only if there is a card.
    pub(super) fn upload(&mut self, bytes: usize, data: impl FnOnce() -> Vec<u8>) -> Region {
        let made = self.device.clone().map(|device| {
            let data = data();
            debug_assert_eq!(data.len(), bytes);
            device.upload(&data)
        });
        let memory = made.and_then(|made| self.keep(made));
        self.region(bytes, memory)
    }

    /// Copies bytes to the landing, `offset` bytes into it, behind all earlier work; they stay until
    /// the next bytes land there. All of the landing is [`LANDING`] bytes.
    pub(super) fn land(&mut self, offset: usize, data: &[u8]) -> DevicePtr {
        debug_assert!(offset + data.len() <= LANDING);
        if self.landing.is_none() {
            self.landing = Some(self.zeros(LANDING));
        }
        let at = self.landing.as_ref().map_or(0, |l| l.at) + offset as u64;
        self.fill(at, data);
        at
    }

    /// Copies bytes to an address in a live region behind all earlier work; they are not needed
    /// any more when it returns.
    pub(super) fn fill(&mut self, at: DevicePtr, data: &[u8]) {
        let Some(device) = self.device.clone().filter(|_| self.failure.is_none()) else {
            return;
        };
        let sent = self.staged(|staging| {
            let bytes = data.len().next_multiple_of(4);
            staging.send(&device, &[Extent { at, bytes }], data)
        });
        self.keep(sent);
    }

    fn staged<T>(
        &mut self,
        work: impl FnOnce(&mut Staging) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let mut staging = match self.staging.take() {
            Some(staging) => staging,
            None => Staging::new()?,
        };
        let result = work(&mut staging);
        self.staging = Some(staging);
        result
    }

    /// Everything is on the card: the landing is given back, and the way there handed on.
    pub(super) fn loaded(&mut self) -> Result<Staging, DeviceError> {
        if let Some(device) = &self.device {
            device.wait()?;
        }
        self.landing = None;
        self.staging.take().map_or_else(Staging::new, Ok)
    }

    /// Random bf16 numbers of the size that weights have.
    pub(super) fn randomize(&mut self, region: &Region, bytes: usize) {
        let args = YardstickArgs {
            data: region.at,
            out: 0,
            bytes: bytes as u64,
            seed: bytes as u32,
            kind: 0,
        };
        // SAFETY: the region is that long.
        unsafe { self.launch("fill", [2048, 1, 1], 256, 0, &args) };
    }

    /// Launches a kernel that reads and writes nothing.
    pub(super) fn fault(&mut self, kernel: &str, args: &YardstickArgs) {
        // SAFETY: these kernels follow none of the block's addresses.
        unsafe { self.launch(kernel, [1, 1, 1], 32, 0, args) };
    }

    /// What is launched next waits for all earlier work: kernels behind it may read what that wrote
    /// before they wait for the kernels in front of them.
    pub(super) fn begin(&mut self) {
        self.fresh = true;
    }

    /// What is launched from now on, until [`Card::back`], runs beside what is launched then.
    pub(super) fn fork(&mut self) {
        let forked = self.device.clone().map(|device| device.fork());
        forked.and_then(|forked| self.keep(forked));
        (self.lane, self.fresh) = (Lane::Side, true);
    }

    /// Behind what stood in front of the fork.
    pub(super) fn back(&mut self) {
        (self.lane, self.fresh) = (Lane::Main, false);
    }

    /// What follows waits for what was launched beside.
    pub(super) fn join(&mut self) {
        let joined = self.device.clone().map(|device| device.join());
        joined.and_then(|joined| self.keep(joined));
        self.fresh = true;
    }

    /// Launches a kernel behind all earlier work, overlapping the end of the one before.
    ///
    /// # Safety
    /// `args` is the kernel's own parameter block, and its addresses are those of live regions
    /// that are large enough.
    pub(super) unsafe fn launch<A: Copy>(
        &mut self,
        kernel: &str,
        blocks: [usize; 3],
        threads: u32,
        shared: usize,
        args: &A,
    ) {
        // A chunk of prefill that emits nothing has no rows for some launches.
        if self.failure.is_some() || blocks.contains(&0) {
            return;
        }
        let Some(device) = self.device.clone() else {
            return;
        };
        let grid = Grid {
            blocks: blocks.map(|b| b as u32),
            threads,
            shared,
        };
        // SAFETY: the caller's word.
        let launched = unsafe { device.launch_in(self.lane, kernel, grid, args, !self.fresh) };
        self.fresh = false;
        self.keep(launched);
    }
}
