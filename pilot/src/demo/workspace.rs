//! The workspace of the demo: a folder of small records, some of them broken on purpose, and a
//! goal. The rules are those of the demo checkpoint's training data, so that the small model is at
//! home in it.

use std::{fs, io, os::unix::fs::symlink, path::Path};

use super::random::Random;

/// The folder of the records.
pub const FOLDER: &str = "inbox";
/// The file that the run makes.
pub const REPORT: &str = "report.txt";
/// Records at most; what the model was trained on.
pub const MAX_FILES: usize = 48;

const CONSONANTS: &str = "bdfghjklmnprstvz";
const VOWELS: &str = "aeiou";
const DIGITS: [&str; 10] = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"];
const HEADINGS: [&str; 5] = [
    "Records of {}",
    "Report for {}",
    "Register of {}",
    "Open records of {}",
    "Cards for {}",
];
const ENDINGS: [&str; 4] = ["before", "today", "again", "too"];
const WORDS: &str = "amber autumn basket bridge bronze candle canvas cellar cherry copper corner \
    cotton field garden glass harbor hollow iron island kitchen ladder lantern linen maple market \
    meadow mirror morning north orchard paper pepper pillow plain quiet river saddle salt silver \
    smoke south spring stone summer table thunder timber tower valley velvet village walnut water \
    wheel willow window winter wool yellow";

/// What stands under a record's name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record {
    /// A text file.
    Text(String),
    /// A link to nowhere.
    Dangling,
    /// A folder.
    Folder,
    /// A file that is no text.
    Binary,
}

/// A workspace before the run, and its goal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// First line of the report.
    pub heading: String,
    /// What the model is asked to do.
    pub goal: String,
    /// File name (`NAME.txt`) and what it is.
    pub records: Vec<(String, Record)>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Plain,
    Twice,
    Dangling,
    Folder,
    Binary,
}

impl Plan {
    /// The workspace named by `seed`, with `files` records (1 to [`MAX_FILES`]).
    pub fn new(seed: u64, files: usize) -> Self {
        let mut random = Random::new(seed);
        let heading = random.pick(&HEADINGS).replace("{}", &person(&mut random));
        let mut kinds = Vec::new();
        for kind in [Kind::Twice, Kind::Dangling, Kind::Folder, Kind::Binary] {
            kinds.extend([kind; 2]);
        }
        kinds.resize(files, Kind::Plain);
        random.shuffle(&mut kinds);
        let records = names(&mut random, files)
            .into_iter()
            .zip(kinds)
            .map(|(name, kind)| (format!("{name}.txt"), record(&mut random, kind)))
            .collect();
        let goal = format!(
            "Work through the records in the folder {FOLDER}. Start the file {REPORT} with the \
             line \"{heading}\". For every record, in the order of the listing: read it, append \
             the line \"NAME | OWNER | CODE\" to {REPORT}, then edit \"state: open\" to \
             \"state: done\" in the record. If a record cannot be read, append \
             \"NAME | unreadable\" and go on. At the end look at {REPORT}, then finish."
        );
        Self {
            heading,
            goal,
            records,
        }
    }

    /// Calls of a run that makes no detour.
    pub fn expected_calls(&self) -> u64 {
        let per_record = |record: &Record| match record {
            Record::Text(text) if text.matches("state: open").count() > 1 => 4,
            Record::Text(_) => 3,
            Record::Dangling | Record::Folder | Record::Binary => 2,
        };
        // The heading and the listing before, a look at the report and the end after.
        self.records.iter().map(|(_, r)| per_record(r)).sum::<u64>() + 5
    }

    /// Puts it on the disk, in a folder that does not exist yet.
    pub fn build(&self, root: &Path) -> io::Result<()> {
        fs::create_dir(root)?;
        let folder = root.join(FOLDER);
        fs::create_dir(&folder)?;
        for (name, record) in &self.records {
            let path = folder.join(name);
            match record {
                Record::Text(text) => fs::write(path, text)?,
                Record::Dangling => symlink(format!("nowhere/{name}"), path)?,
                Record::Folder => fs::create_dir(path)?,
                Record::Binary => fs::write(path, b"\x89\xff\x00\x01record\xfe\x00")?,
            }
        }
        Ok(())
    }
}

fn syllables() -> Vec<String> {
    let pair = |c: char| VOWELS.chars().map(move |v| format!("{c}{v}"));
    CONSONANTS.chars().flat_map(pair).collect()
}

/// An invented name of two or three different syllables with a capital.
fn person(random: &mut Random) -> String {
    let count = 2 + random.below(2);
    let name = random.sample(&syllables(), count).concat();
    name[..1].to_uppercase() + &name[1..]
}

/// No two of them begin, and no two end, with the same syllable.
fn names(random: &mut Random, count: usize) -> Vec<String> {
    let all = syllables();
    let firsts = random.sample(&all, count);
    let mut lasts = random.sample(&all, count);
    for at in 0..count {
        if firsts[at] == lasts[at] {
            let free: Vec<String> = all
                .iter()
                .filter(|s| !lasts.contains(s) && **s != firsts[at])
                .cloned()
                .collect();
            lasts[at] = random.pick(&free);
        }
    }
    let joined = firsts.iter().zip(&lasts).map(|(first, last)| {
        if random.percent(30) {
            return format!("{first}{last}");
        }
        let free: Vec<String> = all
            .iter()
            .filter(|s| *s != first && *s != last)
            .cloned()
            .collect();
        format!("{first}{}{last}", random.pick(&free))
    });
    joined.collect()
}

fn record(random: &mut Random, kind: Kind) -> Record {
    match kind {
        Kind::Dangling => Record::Dangling,
        Kind::Folder => Record::Folder,
        Kind::Binary => Record::Binary,
        Kind::Plain => Record::Text(text(random, false)),
        Kind::Twice => Record::Text(text(random, true)),
    }
}

fn text(random: &mut Random, twice: bool) -> String {
    let words: Vec<&str> = WORDS.split_whitespace().collect();
    let digits = random.pick(&[4, 4, 5]);
    let mut lines = vec![
        format!("owner: {}", person(random)),
        format!("code: {}", random.sample(&DIGITS, digits).concat()),
    ];
    let title = 2 + random.below(2);
    let noise = [
        format!("title: {}", random.sample(&words, title).join(" ")),
        format!("place: {}", random.pick(&words)),
        format!("topic: {}", random.sample(&words, 2).join(" ")),
    ];
    let extra = if twice {
        random.pick(&[0, 1, 1, 2])
    } else {
        random.pick(&[0, 1, 1, 2, 3])
    };
    lines.extend(random.sample(&noise, extra));
    if twice {
        lines.push(format!("note: was state: open {}", random.pick(&ENDINGS)));
    }
    random.shuffle(&mut lines);
    let first = usize::from(twice);
    let place = first + random.below(lines.len() + 1 - first);
    lines.insert(place, "state: open".to_owned());
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_share_neither_beginning_nor_end() {
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let all = names(&mut random, MAX_FILES);
            let firsts: BTreeSet<&str> = all.iter().map(|n| &n[..2]).collect();
            let lasts: BTreeSet<&str> = all.iter().map(|n| &n[n.len() - 2..]).collect();
            assert_eq!((firsts.len(), lasts.len()), (MAX_FILES, MAX_FILES));
            for name in &all {
                let parts: Vec<&str> = (0..name.len())
                    .step_by(2)
                    .map(|i| &name[i..i + 2])
                    .collect();
                let different: BTreeSet<&&str> = parts.iter().collect();
                assert_eq!(different.len(), parts.len(), "{name}");
                assert!(parts.len() == 2 || parts.len() == 3);
            }
        }
    }

    #[test]
    fn records_follow_the_rules() {
        for seed in 0..200 {
            let plan = Plan::new(seed, 40);
            let odd = plan
                .records
                .iter()
                .filter(|(_, r)| !matches!(r, Record::Text(_)))
                .count();
            assert_eq!(odd, 6);
            let mut twice = 0;
            for (_, record) in &plan.records {
                let Record::Text(text) = record else { continue };
                let lines: Vec<&str> = text.strip_suffix('\n').unwrap().split('\n').collect();
                assert!((3..=6).contains(&lines.len()), "{text}");
                assert_eq!(lines.iter().filter(|l| **l == "state: open").count(), 1);
                let value = |key: &str| lines.iter().find_map(|l| l.strip_prefix(key)).unwrap();
                let code = value("code: ");
                let different: BTreeSet<char> = code.chars().collect();
                assert!((4..=5).contains(&code.len()) && different.len() == code.len());
                assert!(value("owner: ").starts_with(char::is_uppercase));
                if text.matches("state: open").count() == 2 {
                    twice += 1;
                    assert_ne!(lines[0], "state: open", "the line before makes it unique");
                }
            }
            assert_eq!(twice, 2);
        }
    }

    #[test]
    fn a_seed_names_one_workspace_of_any_size() {
        assert_eq!(Plan::new(7, 40), Plan::new(7, 40));
        assert_ne!(Plan::new(7, 40), Plan::new(8, 40));
        for files in 1..=MAX_FILES {
            assert_eq!(Plan::new(7, files).records.len(), files);
        }
        assert!(Plan::new(7, 40).expected_calls() >= 100);
    }

    #[test]
    fn it_stands_on_the_disk_as_planned() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("w");
        let plan = Plan::new(5, 12);
        plan.build(&root).unwrap();
        for (name, record) in &plan.records {
            let path = root.join(FOLDER).join(name);
            match record {
                Record::Text(text) => assert_eq!(&fs::read_to_string(path).unwrap(), text),
                Record::Dangling => assert!(path.is_symlink() && !path.exists()),
                Record::Folder => assert!(path.is_dir()),
                Record::Binary => assert!(String::from_utf8(fs::read(path).unwrap()).is_err()),
            }
        }
        // Never over something that exists.
        assert!(plan.build(&root).is_err());
    }
}
