//! Saves the prefix cache beside the engine's work, and takes it in again at the start.
//!
//! The engine's thread copies blocks from the device, a piece between two steps; a thread of its
//! own writes them. Between them lies a short queue: a slow disk makes saving slow and nothing
//! else. What is saved once is not saved again, so that a turn costs what it added. What the cache
//! gives up before it was saved is given to that thread too.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::{Receiver, SyncSender, TrySendError, sync_channel},
    },
    thread::JoinHandle,
    time::Duration,
};

use super::fill::{FromStore, fill};
use crate::{
    backend::{ExecError, Executor},
    sched::{
        below::Found, image::AnchorImage, prefix::AnchorId, request::Request, scheduler::Scheduler,
        tokens::PrefixKey, types::Group,
    },
    snapshot::{Folder, file::Content, kv::KvStore},
};

/// What a generation of a predecessor is needed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Revival {
    /// It has ended: its log is read.
    ToRead,
    /// It goes on.
    ToGoOn,
}

/// Makes what a front end attached to a request again, from the request's note.
pub type Revive = Box<dyn Fn(&mut Request, Revival) + Send + Sync>;

/// Where an engine leaves what its successor needs.
pub struct Storage {
    /// The folder, which this process has for itself.
    pub folder: Arc<Folder>,
    /// Bytes of blocks in it, at most.
    pub quota: u64,
    /// How often new blocks are saved.
    pub interval: Duration,
    /// Bytes a second written while the engine works, at most.
    pub bandwidth: u64,
    /// See [`Revive`].
    pub revive: Revive,
}

/// Bytes of units in one file, about.
const PIECE: usize = 16 << 20;
/// Bytes of units copied between two steps, about: nobody waits long for that.
const AT_A_TIME: usize = 1 << 20;
/// Pieces that wait to be written, at most.
const QUEUE: usize = 2;
/// Bytes that were given to it and wait, at most about.
const GIVEN_MOST: usize = 64 << 20;
/// Time until the next piece when the writer is busy.
const BUSY: Duration = Duration::from_millis(10);

type Piece = (Content, Vec<u8>);

/// See the module's description.
pub(super) struct Saver {
    store: Arc<KvStore>,
    pieces: SyncSender<Piece>,
    writer: JoinHandle<()>,
    /// The engine ends: no time is given away any more.
    hurry: Arc<AtomicBool>,
    interval: Duration,
    due: Duration,
    /// Anchors left in this pass.
    queue: VecDeque<AnchorId>,
    /// Units handed over in this pass.
    sent: HashSet<PrefixKey>,
    /// Anchors that are on disk, whole and as they are here.
    complete: HashMap<AnchorId, AnchorImage>,
    /// What the store had given up when that was so.
    complete_at: u64,
    /// The piece that is being copied.
    part: Option<Part>,
    /// Pieces of what the cache gave up, copied already.
    given: VecDeque<Piece>,
    given_bytes: usize,
    /// Pieces that are not written yet.
    pending: Arc<AtomicUsize>,
    /// A piece for which the writer had no room.
    waiting: Option<Piece>,
    /// The device does not give its blocks.
    off: bool,
}

impl Saver {
    /// Opens the store and starts the thread that writes.
    pub(super) fn start(storage: Storage) -> io::Result<Self> {
        let store = Arc::new(KvStore::open(storage.folder, storage.quota));
        let (pieces, inbox) = sync_channel(QUEUE);
        let hurry = Arc::new(AtomicBool::new(false));
        let pending = Arc::<AtomicUsize>::default();
        let (to, in_hurry, left) = (store.clone(), hurry.clone(), pending.clone());
        let writer = std::thread::Builder::new()
            .name("snapshots".into())
            .spawn(move || write(&to, &inbox, storage.bandwidth, (&in_hurry, &left)))?;
        Ok(Self {
            store,
            pieces,
            writer,
            hurry,
            interval: storage.interval,
            due: storage.interval,
            queue: VecDeque::new(),
            sent: HashSet::new(),
            complete: HashMap::new(),
            complete_at: 0,
            part: None,
            given: VecDeque::new(),
            given_bytes: 0,
            pending,
            waiting: None,
            off: false,
        })
    }

    /// Takes in what is on disk, newest first, as far as there are free blocks.
    pub(super) fn restore(
        &mut self,
        now: Duration,
        scheduler: &mut Scheduler,
        executor: &mut dyn Executor,
    ) {
        let (mut anchors, mut tokens) = (0, 0);
        let stride = scheduler.stride();
        for (image, chain) in self.store.anchors() {
            let Some(restored) = scheduler.restore(now, &image, &chain) else {
                continue;
            };
            let found = Found { image, chain };
            let mut source = FromStore::new(&self.store);
            match fill(&mut source, &found, &restored, executor) {
                Ok(_) => {
                    anchors += 1;
                    tokens += restored.units.len() * stride + found.image.tail.len();
                }
                Err(reason) => {
                    tracing::warn!(
                        reason,
                        "a saved prefix cannot be used; it is computed again"
                    );
                    scheduler.forget_anchor(restored.anchor);
                }
            }
        }
        if anchors > 0 {
            tracing::info!(
                anchors,
                tokens,
                "prefixes were taken in from the snapshot folder"
            );
        }
    }

    /// Where it writes to.
    pub(super) fn store(&self) -> &Arc<KvStore> {
        &self.store
    }

    /// Whether more may be given to it now.
    pub(super) fn has_room(&self) -> bool {
        !self.off && self.given_bytes < GIVEN_MOST
    }

    /// Pieces that were copied and are not written yet.
    pub(super) fn pending(&self) -> usize {
        self.pending.load(Ordering::Relaxed)
    }

    /// Takes bytes that were copied already: their blocks are being given up.
    pub(super) fn give(&mut self, content: Content, bytes: Vec<u8>) {
        self.given_bytes += bytes.len();
        self.pending.fetch_add(1, Ordering::Relaxed);
        self.given.push_back((content, bytes));
    }

    /// Time until there is something to do; `None` for never.
    pub(super) fn next(&self, now: Duration) -> Option<Duration> {
        if self.off {
            return None;
        }
        if !self.has_nothing_to_do() {
            return Some(BUSY);
        }
        Some(self.due.saturating_sub(now))
    }

    /// The next pass need not wait for its time.
    pub(super) fn save_soon(&mut self, now: Duration) {
        self.due = now;
    }

    /// Saves a piece, if it is time to and the writer has room.
    pub(super) fn advance(
        &mut self,
        now: Duration,
        scheduler: &Scheduler,
        executor: &mut dyn Executor,
    ) {
        if self.off {
            return;
        }
        if self.has_nothing_to_do() {
            if now < self.due {
                return;
            }
            self.begin_pass(scheduler);
            self.due = now.saturating_add(self.interval);
        }
        let at_most = match scheduler.is_idle() {
            true => PIECE,
            false => AT_A_TIME,
        };
        let piece = self.waiting.take().or_else(|| self.next_given());
        let piece = match piece {
            Some(piece) => piece,
            None => match self.next_piece(scheduler, executor, at_most) {
                Turn::Piece(piece) => piece,
                Turn::More | Turn::Over => return,
            },
        };
        match self.pieces.try_send(piece) {
            Ok(()) => {}
            Err(TrySendError::Full(piece)) => self.waiting = Some(piece),
            Err(TrySendError::Disconnected(_)) => {
                tracing::error!(
                    "the thread that writes snapshots is gone; a restart will compute what it had \
                     not written"
                );
                self.turn_off();
            }
        }
    }

    /// Nothing is saved any more, and nothing waits to be.
    fn turn_off(&mut self) {
        self.off = true;
        self.given.clear();
        self.given_bytes = 0;
        self.part = None;
        self.pending.store(0, Ordering::Relaxed);
    }

    /// Saves all that is left, if `sound`, and waits until it is written.
    pub(super) fn finish(
        mut self,
        sound: bool,
        scheduler: &Scheduler,
        executor: &mut dyn Executor,
    ) {
        self.hurry.store(true, Ordering::Relaxed);
        // What waits was copied while the device was sound.
        let mut piece = self.waiting.take();
        self.begin_pass(scheduler);
        loop {
            if let Some(piece) = piece.take()
                && self.pieces.send(piece).is_err()
            {
                break;
            }
            piece = self.next_given();
            if piece.is_some() {
                continue;
            }
            if !sound || self.off {
                break;
            }
            match self.next_piece(scheduler, executor, PIECE) {
                Turn::Piece(next) => piece = Some(next),
                Turn::More => {}
                Turn::Over => break,
            }
        }
        drop(self.pieces);
        if self.writer.join().is_err() {
            tracing::error!("the thread that writes snapshots panicked");
        }
    }

    fn has_nothing_to_do(&self) -> bool {
        self.waiting.is_none()
            && self.queue.is_empty()
            && self.part.is_none()
            && self.given.is_empty()
    }

    fn next_given(&mut self) -> Option<Piece> {
        let piece = self.given.pop_front()?;
        self.given_bytes -= piece.1.len();
        Some(piece)
    }

    fn begin_pass(&mut self, scheduler: &Scheduler) {
        self.sent.clear();
        let copied = self.part.iter().flat_map(|part| &part.keys);
        self.sent.extend(copied);
        self.queue = scheduler.prefixes().worth_saving().into();
        let worth: HashSet<AnchorId> = self.queue.iter().copied().collect();
        self.complete.retain(|id, _| worth.contains(id));
    }

    /// Whether an anchor is on disk; with whether that had to be looked up there, unit by unit.
    fn is_saved(&mut self, id: AnchorId, image: &AnchorImage) -> (bool, bool) {
        let removals = self.store.removals();
        if self.complete_at != removals {
            self.complete.clear();
            self.complete_at = removals;
        }
        if self.complete.get(&id).is_some_and(|there| there == image) {
            return (true, false);
        }
        let saved = self.store.has_anchor(image);
        if saved {
            self.complete.insert(id, image.clone());
        }
        (saved, true)
    }

    /// Copies what comes next, about `at_most` bytes of units. Looks through at most one anchor that
    /// may be on disk already.
    fn next_piece(
        &mut self,
        scheduler: &Scheduler,
        executor: &mut dyn Executor,
        at_most: usize,
    ) -> Turn {
        let prefixes = scheduler.prefixes();
        while let Some(&id) = self.queue.front() {
            // It may have been given up in the meantime, or saved before.
            let Some(image) = prefixes.image(id) else {
                self.queue.pop_front();
                continue;
            };
            let (saved, looked_up) = self.is_saved(id, &image);
            if saved {
                self.queue.pop_front();
                if looked_up {
                    return Turn::More;
                }
                continue;
            }
            let chain = prefixes.chain(id);
            let copied = match self.copy_units(&chain, scheduler, executor, at_most) {
                Ok(Copied::Part) => return Turn::More,
                Ok(Copied::Piece(piece)) => Ok(Some(piece)),
                Ok(Copied::All) => {
                    self.queue.pop_front();
                    anchor_of(id, image, scheduler, executor)
                }
                Err(error) => Err(error),
            };
            match copied {
                Ok(Some(piece)) => return Turn::Piece(self.count(piece)),
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(%error, "blocks cannot be saved; a restart will compute them");
                    self.off = true;
                    return Turn::Over;
                }
            }
        }
        match self.part.take() {
            Some(part) => Turn::Piece(self.count(part.into_piece())),
            None => Turn::Over,
        }
    }

    fn count(&self, piece: Piece) -> Piece {
        self.pending.fetch_add(1, Ordering::Relaxed);
        piece
    }

    /// Copies the first units of a chain that are not on disk yet.
    fn copy_units(
        &mut self,
        chain: &[PrefixKey],
        scheduler: &Scheduler,
        executor: &mut dyn Executor,
        at_most: usize,
    ) -> Result<Copied, ExecError> {
        let sent = |key: &PrefixKey| self.sent.contains(key);
        let (mut part, missing) = match self.part.take() {
            Some(part) => {
                let last = chain.iter().position(|key| part.keys.last() == Some(key));
                let Some(last) = last else {
                    // Its chain was given up: what was copied of it is whole by itself.
                    return Ok(Copied::Piece(part.into_piece()));
                };
                let next = last + 1;
                let missing = self.store.first_missing(chain, next, sent);
                let missing = missing.filter(|missing| missing.start == next);
                (part, missing.unwrap_or(next..next))
            }
            None => {
                let Some(missing) = self.store.first_missing(chain, 0, sent) else {
                    return Ok(Copied::All);
                };
                let parent = missing.start.checked_sub(1).and_then(|at| chain.get(at));
                let part = Part {
                    parent: parent.copied(),
                    keys: Vec::new(),
                    bytes: Vec::new(),
                };
                (part, missing)
            }
        };
        let enough = part.bytes.len().saturating_add(at_most);
        for &key in &chain[missing] {
            if part.bytes.len() >= PIECE {
                break;
            }
            if part.bytes.len() >= enough {
                self.part = Some(part);
                return Ok(Copied::Part);
            }
            let blocks = scheduler.prefixes().unit_blocks(&key).unwrap_or_default();
            executor.save_blocks(Group::Full, &blocks, &mut part.bytes)?;
            part.keys.push(key);
            self.sent.insert(key);
        }
        Ok(Copied::Piece(part.into_piece()))
    }
}

/// Units of a chain that are being copied, over several steps.
struct Part {
    /// The key before the first of them.
    parent: Option<PrefixKey>,
    keys: Vec<PrefixKey>,
    bytes: Vec<u8>,
}

impl Part {
    fn into_piece(self) -> Piece {
        let content = Content::Units {
            parent: self.parent,
            keys: self.keys,
        };
        (content, self.bytes)
    }
}

/// What came of looking for the next piece.
enum Turn {
    Piece(Piece),
    /// None yet: the next turn goes on.
    More,
    /// The pass is over.
    Over,
}

/// How far the units of a chain are copied.
enum Copied {
    /// Some; the rest between later steps.
    Part,
    /// As many as make a piece.
    Piece(Piece),
    /// All were before.
    All,
}

fn anchor_of(
    id: AnchorId,
    image: AnchorImage,
    scheduler: &Scheduler,
    executor: &mut dyn Executor,
) -> Result<Option<Piece>, ExecError> {
    let Some(blocks) = scheduler.prefixes().anchor_blocks(id) else {
        return Ok(None);
    };
    let mut bytes = Vec::new();
    executor.save_blocks(Group::Full, &blocks.tail, &mut bytes)?;
    executor.save_blocks(Group::Sliding, &blocks.window, &mut bytes)?;
    Ok(Some((Content::Anchor(image), bytes)))
}

/// Writes pieces as they come, no faster than allowed, until nobody can send any more.
fn write(
    store: &KvStore,
    pieces: &Receiver<Piece>,
    bandwidth: u64,
    (hurry, pending): (&AtomicBool, &AtomicUsize),
) {
    let mut failing = false;
    for (content, data) in pieces {
        match store.write(content, &data) {
            Ok(()) if failing => {
                failing = false;
                tracing::info!("snapshots are written again");
            }
            Ok(()) => {}
            Err(error) if !failing => {
                failing = true;
                tracing::warn!(
                    %error,
                    "a snapshot could not be written; service goes on, but until this is mended \
                     a restart computes again what was not saved"
                );
            }
            Err(_) => {}
        }
        pending.fetch_sub(1, Ordering::Relaxed);
        if !hurry.load(Ordering::Relaxed) {
            let seconds = data.len() as f64 / bandwidth.max(1) as f64;
            std::thread::sleep(Duration::from_secs_f64(seconds.min(1.0)));
        }
    }
}
