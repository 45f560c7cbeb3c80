//! Bytes on their way between host memory and the card, through page-locked memory in two halves:
//! while one travels, the other is filled or emptied.

#![allow(unsafe_code, reason = "copies to and from places on the card")]

use marathon_kernels::{
    abi::DevicePtr,
    device::{Device, DeviceError},
    host::Pinned,
    mark::Mark,
};

/// Bytes of a half: long enough for the full rate of the bus.
const HALF: usize = 16 << 20;
/// Threads that copy, and bytes that are worth one.
const THREADS: usize = 8;
const LEAST_SHARE: usize = 512 << 10;
const WORD: usize = size_of::<u32>();

/// A run of bytes on the card, a multiple of four.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) at: DevicePtr,
    pub(super) bytes: usize,
}

struct Half {
    memory: Pinned,
    /// Behind the last copy to or from it.
    idle: Mark,
}

/// Two halves, used in turns.
pub(super) struct Staging {
    halves: [Half; 2],
    next: usize,
}

impl Half {
    fn new() -> Result<Self, DeviceError> {
        Ok(Self {
            memory: Pinned::new(HALF / WORD)?,
            idle: Mark::new()?,
        })
    }
}

impl Staging {
    /// The device must be bound to the calling thread.
    pub(super) fn new() -> Result<Self, DeviceError> {
        Ok(Self {
            halves: [Half::new()?, Half::new()?],
            next: 0,
        })
    }

    fn turn(&mut self) -> usize {
        self.next ^= 1;
        self.next ^ 1
    }

    /// Copies bytes to these places in turn, behind all earlier work. The last copies may still be
    /// under way when it returns; the bytes are not needed any more.
    pub(super) fn send(
        &mut self,
        device: &Device,
        to: &[Extent],
        bytes: &[u8],
    ) -> Result<(), DeviceError> {
        let mut left = bytes;
        for load in loads(to, HALF) {
            let turn = self.turn();
            let half = &mut self.halves[turn];
            half.idle.wait()?;
            let total = load.iter().map(|piece| piece.bytes).sum();
            let (mine, rest) = left.split_at(left.len().min(total));
            copy(mine, &mut half.memory.as_bytes_mut()[..mine.len()]);
            left = rest;
            let mut word = 0;
            for piece in load {
                let words = word..word + piece.bytes / WORD;
                word = words.end;
                // SAFETY: the piece is part of an extent of the caller's, and the half is not
                // written again before its mark is reached.
                unsafe { device.send(piece.at, &half.memory, words)? };
            }
            device.set(&half.idle)?;
        }
        Ok(())
    }

    /// Appends what these places hold once all earlier work is done.
    pub(super) fn fetch(
        &mut self,
        device: &Device,
        from: &[Extent],
        into: &mut Vec<u8>,
    ) -> Result<(), DeviceError> {
        let mut coming: Option<(usize, usize)> = None;
        for load in loads(from, HALF) {
            let turn = self.turn();
            let half = &mut self.halves[turn];
            let mut word = 0;
            for piece in load {
                let words = word..word + piece.bytes / WORD;
                word = words.end;
                // SAFETY: the piece is part of an extent of the caller's, and the half is read
                // when its mark is reached.
                unsafe { device.fetch(&mut half.memory, words, piece.at)? };
            }
            device.set(&half.idle)?;
            if let Some(arriving) = coming.replace((turn, word * WORD)) {
                self.empty(arriving, into)?;
            }
        }
        match coming {
            Some(arriving) => self.empty(arriving, into),
            None => Ok(()),
        }
    }

    fn empty(&self, (turn, bytes): (usize, usize), into: &mut Vec<u8>) -> Result<(), DeviceError> {
        let half = &self.halves[turn];
        half.idle.wait()?;
        into.extend_from_slice(&half.memory.as_bytes()[..bytes]);
        Ok(())
    }
}

/// Copies by several threads where it is much: bytes of a mapped file come from the disk while they
/// are copied, and one thread waits for one page at a time.
fn copy(from: &[u8], to: &mut [u8]) {
    let share = from.len().div_ceil(THREADS).max(LEAST_SHARE);
    if from.len() <= share {
        return to.copy_from_slice(from);
    }
    std::thread::scope(|scope| {
        for (from, to) in from.chunks(share).zip(to.chunks_mut(share)) {
            scope.spawn(move || to.copy_from_slice(from));
        }
    });
}

/// Cuts places into loads of at most `most` bytes, in order.
fn loads(places: &[Extent], most: usize) -> Vec<Vec<Extent>> {
    let mut all: Vec<Vec<Extent>> = Vec::new();
    let mut room = 0;
    for place in places {
        let mut left = *place;
        while left.bytes > 0 {
            if room == 0 {
                all.push(Vec::new());
                room = most;
            }
            let piece = Extent {
                bytes: left.bytes.min(room),
                ..left
            };
            if let Some(load) = all.last_mut() {
                load.push(piece);
            }
            room -= piece.bytes;
            left.at += piece.bytes as u64;
            left.bytes -= piece.bytes;
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_any_length_are_whole() {
        for length in [0, 1, LEAST_SHARE, LEAST_SHARE + 1, 9 * LEAST_SHARE + 5] {
            let from: Vec<u8> = (0..length).map(|i| (i * 7 % 251) as u8).collect();
            let mut to = vec![0; length];
            copy(&from, &mut to);
            assert!(to == from, "{length} bytes");
        }
    }

    #[test]
    fn loads_are_full_and_hold_every_byte_once_in_order() {
        for sizes in [vec![4, 8, 4], vec![100], vec![12, 24, 4, 60, 8], vec![]] {
            let mut at = 1000;
            let places: Vec<Extent> = sizes
                .iter()
                .map(|&bytes| {
                    at += 1000;
                    Extent { at, bytes }
                })
                .collect();
            let cut = loads(&places, 16);
            let size = |load: &Vec<Extent>| load.iter().map(|p| p.bytes).sum::<usize>();
            let (last, full) = cut.split_last().map_or((0, 0), |(last, before)| {
                assert!(before.iter().all(|load| size(load) == 16));
                (size(last), before.len())
            });
            assert!(last <= 16);
            assert_eq!(full * 16 + last, sizes.iter().sum::<usize>());
            let bytes = |p: &Extent| p.at..p.at + p.bytes as u64;
            let all: Vec<u64> = cut.iter().flatten().flat_map(bytes).collect();
            let expected: Vec<u64> = places.iter().flat_map(bytes).collect();
            assert_eq!(all, expected);
        }
    }
}
