//! What a tool knows about its effect before it acts; journaled with the intent.

use serde::{Deserialize, Serialize};

/// Facts of one call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Facts {
    /// Nothing to know: the class alone decides.
    None,
    /// One file changes, from one known content to another.
    File(FileFacts),
    /// A supervised command with a spool folder of this name below [`super::ToolContext::spool`].
    Spool {
        /// Folder name, unique in the run.
        name: String,
    },
}

/// Length and BLAKE3 of a file's content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileImage {
    /// Bytes.
    pub len: u64,
    /// BLAKE3 of all of them.
    pub hash: [u8; 32],
}

impl FileImage {
    /// The image of this content.
    pub fn of(content: &[u8]) -> Self {
        Self {
            len: content.len() as u64,
            hash: *blake3::hash(content).as_bytes(),
        }
    }
}

/// A file before and after a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileFacts {
    /// Path as the model gave it, relative to the workspace.
    pub path: String,
    /// Content before; `None` if the file did not exist.
    pub before: Option<FileImage>,
    /// Content after.
    pub after: FileImage,
}

/// Where a file stands between the two contents of its [`FileFacts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileState {
    /// As before the call.
    Before,
    /// As after the call.
    After,
    /// The old content and a part of what was to be appended: cutting it to the old length (or
    /// removing it, if it did not exist) loses nothing of anybody else's.
    Torn,
    /// Neither: somebody else changed it.
    Other,
}

impl FileFacts {
    /// Compares the content found now (`None`: no file) with the facts. `appended` holds the bytes
    /// an append was to add; `None` for a call that replaces the file at once and cannot tear.
    pub fn state_of(&self, current: Option<&[u8]>, appended: Option<&[u8]>) -> FileState {
        let Some(content) = current else {
            return if self.before.is_none() {
                FileState::Before
            } else {
                FileState::Other
            };
        };
        let image = FileImage::of(content);
        if image == self.after {
            return FileState::After;
        }
        if self.before.as_ref() == Some(&image) {
            return FileState::Before;
        }
        match appended {
            Some(tail) if self.is_torn_append(content, tail) => FileState::Torn,
            _ => FileState::Other,
        }
    }

    /// Old content, then a prefix of `tail`, then only zeros (blocks that a power cut left unwritten).
    fn is_torn_append(&self, content: &[u8], tail: &[u8]) -> bool {
        let old_len = self.before.as_ref().map_or(0, |image| image.len);
        if content.len() as u64 > self.after.len || (content.len() as u64) < old_len {
            return false;
        }
        let (old, added) = content.split_at(old_len as usize);
        if self
            .before
            .as_ref()
            .is_some_and(|image| *image != FileImage::of(old))
        {
            return false;
        }
        let same = added
            .iter()
            .zip(tail)
            .take_while(|(found, meant)| found == meant)
            .count();
        added[same..].iter().all(|byte| *byte == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn append_facts(before: Option<&[u8]>, tail: &[u8]) -> FileFacts {
        let mut after = before.unwrap_or_default().to_vec();
        after.extend_from_slice(tail);
        FileFacts {
            path: "notes.txt".into(),
            before: before.map(FileImage::of),
            after: FileImage::of(&after),
        }
    }

    #[test]
    fn every_cut_of_an_append_is_before_torn_or_after() {
        let facts = append_facts(Some(b"old\n"), b"new line\n");
        let whole = b"old\nnew line\n";
        for len in 0..=whole.len() {
            let expected = match len {
                0..4 => FileState::Other,
                4 => FileState::Before,
                13 => FileState::After,
                _ => FileState::Torn,
            };
            assert_eq!(
                facts.state_of(Some(&whole[..len]), Some(b"new line\n")),
                expected,
                "{len}"
            );
        }
    }

    #[test]
    fn unwritten_blocks_are_torn_and_foreign_bytes_are_not() {
        let facts = append_facts(Some(b"old\n"), b"new line\n");
        let tail = Some(b"new line\n".as_slice());
        assert_eq!(
            facts.state_of(Some(b"old\nnew\0\0\0\0"), tail),
            FileState::Torn
        );
        assert_eq!(facts.state_of(Some(b"old\nnewt"), tail), FileState::Other);
        assert_eq!(facts.state_of(Some(b"odd\nnew"), tail), FileState::Other);
        assert_eq!(
            facts.state_of(Some(b"old\nnew line\nmore"), tail),
            FileState::Other
        );
    }

    #[test]
    fn a_new_file_is_before_when_absent_and_torn_when_partial() {
        let facts = append_facts(None, b"first\n");
        assert_eq!(facts.state_of(None, Some(b"first\n")), FileState::Before);
        assert_eq!(facts.state_of(Some(b""), Some(b"first\n")), FileState::Torn);
        assert_eq!(
            facts.state_of(Some(b"fir"), Some(b"first\n")),
            FileState::Torn
        );
        assert_eq!(
            facts.state_of(Some(b"first\n"), Some(b"first\n")),
            FileState::After
        );
    }

    #[test]
    fn a_replacement_cannot_be_torn() {
        let facts = FileFacts {
            path: "a".into(),
            before: Some(FileImage::of(b"state: open")),
            after: FileImage::of(b"state: open, done"),
        };
        assert_eq!(
            facts.state_of(Some(b"state: open, d"), None),
            FileState::Other
        );
        assert_eq!(facts.state_of(None, None), FileState::Other);
    }
}
