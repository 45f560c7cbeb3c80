//! Looking into a store that a working pilot holds.
//!
//! sled belongs to one process. So whoever holds a store answers questions about it at a socket in
//! the store's folder, and `pilot list` and `pilot show` read a run that is going on. The socket is
//! its owner's alone.
//!
//! A message is its length (four bytes, little-endian) and postcard. The reader sends one [`Ask`] and
//! gets [`Told`] up to [`Told::End`]. Records travel in the frame they are stored in, so the reader
//! checks their chain as it would on the disk.

use std::{
    fs::{self, File, Permissions},
    io::{self, BufReader, BufWriter, Read, Write},
    os::{
        fd::AsRawFd,
        unix::{
            fs::PermissionsExt,
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use super::{
    Head, History, JournalError, Record, RunListing,
    codec::{self, MAX_PAYLOAD, Stamp},
    sled::SledJournal,
};
use crate::run::entry::RunId;

const SOCKET: &str = "live";

/// Longest message: a record with its frame.
const LONGEST: usize = MAX_PAYLOAD + 1024;

/// How long either side waits for the other to take or give a message.
const PATIENCE: Duration = Duration::from_secs(10);

/// A pause after a connection that could not be taken.
const BREATH: Duration = Duration::from_millis(50);

/// What a reader wants.
#[derive(Debug, Serialize, Deserialize)]
enum Ask {
    /// Every run.
    Runs,
    /// Every record of one.
    Load(String),
}

/// What it is told.
#[derive(Debug, Serialize, Deserialize)]
enum Told {
    /// A run and how many records it has, with the hash of the last.
    Run(String, u64, [u8; 32]),
    /// A run, and what is wrong with it.
    Damaged(String, String),
    /// The next record of the run.
    Record(Vec<u8>),
    /// There is no such run.
    Unknown,
    /// The holder could not say.
    Failed(String),
    /// That was all.
    End,
}

/// Answers readers for as long as it is kept.
pub struct Share {
    /// Held, and with it the store's lock, until the socket is gone: the next holder has its own.
    journal: Arc<SledJournal>,
    ended: Arc<AtomicBool>,
}

impl Share {
    /// Begins to answer for `journal`, whose lock makes this process the only one that may.
    pub fn start(journal: &Arc<SledJournal>) -> io::Result<Self> {
        let path = journal.path();
        let (folder, address) = address(path)?;
        match fs::remove_file(path.join(SOCKET)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&address)?;
        drop(folder);
        fs::set_permissions(path.join(SOCKET), Permissions::from_mode(0o600))?;
        let ended = Arc::new(AtomicBool::new(false));
        let (watched, store) = (Arc::clone(&ended), Arc::downgrade(journal));
        thread::Builder::new()
            .name("store-share".into())
            .spawn(move || serve(&listener, &store, &watched))?;
        Ok(Self {
            journal: Arc::clone(journal),
            ended,
        })
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        // The thread waits for a reader: be one. Without it the thread ends with the process.
        let _ = connect(self.journal.path());
        let _ = fs::remove_file(self.journal.path().join(SOCKET));
    }
}

/// A store seen through the pilot that holds it.
#[derive(Debug)]
pub struct View {
    path: PathBuf,
}

impl View {
    /// The store at `path`, or `None` when nobody answers for it.
    pub fn of(path: &Path) -> Option<Self> {
        connect(path).ok().map(|_| Self {
            path: path.to_owned(),
        })
    }

    /// Asks, and hands over what comes before the end.
    fn ask(
        &self,
        ask: &Ask,
        mut take: impl FnMut(Told) -> Result<(), JournalError>,
    ) -> Result<(), JournalError> {
        let failed = |error: io::Error| {
            let what = format!("asking the pilot that holds {}", self.path.display());
            JournalError::io(what, error)
        };
        let stream = connect(&self.path).map_err(failed)?;
        send(&mut &stream, ask).map_err(failed)?;
        let mut reader = BufReader::new(&stream);
        loop {
            match receive(&mut reader).map_err(failed)? {
                Told::End => return Ok(()),
                Told::Failed(what) => return Err(JournalError::io("the holder's store", what)),
                told => take(told)?,
            }
        }
    }

    fn odd(&self) -> JournalError {
        let what = format!("asking the pilot that holds {}", self.path.display());
        JournalError::io(what, "it answers something else: another version?")
    }
}

impl History for View {
    fn runs(&self) -> Result<Vec<RunListing>, JournalError> {
        let mut runs = Vec::new();
        self.ask(&Ask::Runs, |told| {
            let (run, head) = match told {
                Told::Run(run, next, hash) => (run, Ok(Head { next, hash })),
                Told::Damaged(run, what) => (run, Err(what)),
                _ => return Err(self.odd()),
            };
            let run = RunId::new(run).map_err(|_| self.odd())?;
            runs.push(RunListing { run, head });
            Ok(())
        })?;
        Ok(runs)
    }

    fn load(&self, run: &RunId) -> Result<Vec<Record>, JournalError> {
        let (mut records, mut head) = (Vec::new(), Head::EMPTY);
        self.ask(&Ask::Load(run.to_string()), |told| match told {
            Told::Record(bytes) => {
                let (record, next) =
                    codec::decode(run, head, &bytes).map_err(|error| error.of_store(&self.path))?;
                head = next;
                records.push(record);
                Ok(())
            }
            Told::Damaged(_, what) => Err(JournalError::Damaged {
                path: self.path.clone(),
                what,
            }),
            Told::Unknown => Err(JournalError::UnknownRun(run.to_string())),
            _ => Err(self.odd()),
        })?;
        Ok(records)
    }
}

fn serve(listener: &UnixListener, journal: &Weak<SledJournal>, ended: &AtomicBool) {
    for stream in listener.incoming() {
        if ended.load(Ordering::Acquire) {
            return;
        }
        let (Ok(stream), Some(journal)) = (stream, journal.upgrade()) else {
            // No descriptor is left, say: asking again at once would keep a core busy.
            thread::sleep(BREATH);
            continue;
        };
        // A reader that went away or talks nonsense is its own loss.
        let _ = answer(&stream, &journal);
    }
}

fn answer(stream: &UnixStream, journal: &SledJournal) -> io::Result<()> {
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let ask = receive(&mut BufReader::new(stream))?;
    let mut out = BufWriter::new(stream);
    match ask {
        Ask::Runs => tell_runs(&mut out, journal),
        Ask::Load(run) => tell_records(&mut out, journal, run),
    }?;
    send(&mut out, &Told::End)?;
    out.flush()
}

fn tell_runs(out: &mut impl Write, journal: &SledJournal) -> io::Result<()> {
    match journal.runs() {
        Ok(runs) => runs.into_iter().try_for_each(|listing| {
            let run = listing.run.to_string();
            let told = match listing.head {
                Ok(head) => Told::Run(run, head.next, head.hash),
                Err(what) => Told::Damaged(run, what),
            };
            send(out, &told)
        }),
        Err(error) => send(out, &Told::Failed(error.to_string())),
    }
}

fn tell_records(out: &mut impl Write, journal: &SledJournal, run: String) -> io::Result<()> {
    let Ok(run) = RunId::new(run) else {
        return send(out, &Told::Unknown);
    };
    let records = match journal.load(&run) {
        Ok(records) => records,
        Err(JournalError::UnknownRun(_)) => return send(out, &Told::Unknown),
        Err(JournalError::Damaged { what, .. }) => {
            return send(out, &Told::Damaged(run.to_string(), what));
        }
        Err(error) => return send(out, &Told::Failed(error.to_string())),
    };
    let mut head = Head::EMPTY;
    for record in records {
        let stamp = Stamp {
            epoch: record.epoch,
            wall_ms: record.wall_ms,
        };
        let (bytes, next) = match codec::encode(&run, head, stamp, &record.entry) {
            Ok(framed) => framed,
            Err(error) => return send(out, &Told::Failed(error.to_string())),
        };
        head = next;
        send(out, &Told::Record(bytes))?;
    }
    Ok(())
}

/// Where the socket of the store at `path` is. The address of a socket has room for a hundred
/// characters, so it goes through the folder's descriptor, which has to stay open meanwhile.
fn address(path: &Path) -> io::Result<(File, PathBuf)> {
    let folder = File::open(path)?;
    let address = PathBuf::from(format!("/proc/self/fd/{}/{SOCKET}", folder.as_raw_fd()));
    Ok((folder, address))
}

fn connect(path: &Path) -> io::Result<UnixStream> {
    let (_folder, address) = address(path)?;
    let stream = UnixStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

fn send(out: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let bytes = postcard::to_stdvec(message).map_err(io::Error::other)?;
    let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
    out.write_all(&length.to_le_bytes())?;
    out.write_all(&bytes)
}

fn receive<T: DeserializeOwned>(input: &mut impl Read) -> io::Result<T> {
    let mut length = [0; 4];
    input.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > LONGEST {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("a message of {length} bytes is too long"),
        ));
    }
    let mut bytes = vec![0; length];
    input.read_exact(&mut bytes)?;
    postcard::from_bytes(&bytes).map_err(io::Error::other)
}

#[cfg(test)]
#[path = "share_tests.rs"]
mod tests;
