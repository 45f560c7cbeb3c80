//! Did two marathons do the same, and the right thing? Told by their journals and their folders.

use std::path::Path;

use super::{
    oracle,
    processes::RUN,
    snapshot::{self, Snapshot},
    workspace::{FOLDER, REPORT},
};
use crate::{
    error::Error,
    journal::{History, sled::SledJournal},
    run::{
        entry::{Entry, RunId},
        event::Totals,
        log::{self, AnswerLog},
        state::State,
    },
};

/// What a marathon left behind.
#[derive(Debug)]
pub struct Outcome {
    /// Every answer with its tokens.
    pub answers: Vec<AnswerLog>,
    /// Sums.
    pub totals: Totals,
    /// Tool calls and their results, in words.
    pub calls: Vec<String>,
    /// The folder at the end.
    pub after: Snapshot,
}

impl Outcome {
    /// Reads store and workspace of a marathon that is over.
    pub fn read(store: &Path, workspace: &Path) -> Result<Self, Error> {
        let run = RunId::new(RUN).map_err(Error::Demo)?;
        let records = SledJournal::open(store)?.load(&run)?;
        let entries: Vec<Entry> = records.into_iter().map(|record| record.entry).collect();
        let state = State::fold(&entries)
            .map_err(|(at, e)| Error::Demo(format!("its journal, entry {at}: {}", e.reason)))?;
        let calls = log::calls(&entries).into_iter().map(|call| {
            let request = call
                .intent
                .map(|i| format!("{} {}", i.request.name, i.request.arguments));
            let result = call.ended.map(|e| e.output.text);
            format!(
                "{} -> {}",
                request.unwrap_or_default(),
                result.unwrap_or_default()
            )
        });
        let reading = |source| Error::Io {
            what: "reading the workspace".to_owned(),
            source,
        };
        Ok(Self {
            answers: log::answers(&entries),
            totals: state.totals,
            calls: calls.collect(),
            after: snapshot::take(workspace).map_err(reading)?,
        })
    }

    /// Tokens in all answers.
    pub fn tokens(&self) -> usize {
        self.answers.iter().map(|answer| answer.ids.len()).sum()
    }
}

/// What was found wrong; nothing where all is well.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Between the tokens of the two.
    pub tokens: Vec<String>,
    /// Between the folders of the two.
    pub bytes: Vec<String>,
    /// Between each folder and what it should be.
    pub oracle: Vec<String>,
}

impl Verdict {
    /// Compares two marathons over the same folder `before`.
    pub fn new(before: &Snapshot, heading: &str, killed: &Outcome, calm: &Outcome) -> Self {
        let right = oracle::expected(before, FOLDER, REPORT, heading);
        let named = |name: &str, outcome: &Outcome| -> Vec<String> {
            let wrong = snapshot::differences(&outcome.after, &right);
            wrong
                .into_iter()
                .map(|line| format!("{name}: {line}"))
                .collect()
        };
        Self {
            tokens: compare(killed, calm),
            bytes: snapshot::differences(&killed.after, &calm.after),
            oracle: [named("with kills", killed), named("undisturbed", calm)].concat(),
        }
    }

    /// Nothing is wrong.
    pub fn holds(&self) -> bool {
        self.tokens.is_empty() && self.bytes.is_empty() && self.oracle.is_empty()
    }
}

fn compare(killed: &Outcome, calm: &Outcome) -> Vec<String> {
    let mut wrong = Vec::new();
    if killed.answers.len() != calm.answers.len() {
        let (a, b) = (killed.answers.len(), calm.answers.len());
        wrong.push(format!("{a} answers with kills, {b} without"));
    }
    for (a, b) in killed.answers.iter().zip(&calm.answers) {
        if a == b {
            continue;
        }
        let at = a.ids.iter().zip(&b.ids).take_while(|(x, y)| x == y).count();
        let same_question = (a.step, a.attempt, a.seed, a.prompt_tokens)
            == (b.step, b.attempt, b.seed, b.prompt_tokens);
        let what = if !same_question {
            "another question".to_owned()
        } else if a.ids != b.ids {
            format!("token {at} differs")
        } else {
            "same tokens, read differently".to_owned()
        };
        wrong.push(format!("answer {}: {what}", b.step));
        // What follows from a different answer is different too.
        break;
    }
    if killed.calls != calm.calls {
        let at = killed
            .calls
            .iter()
            .zip(&calm.calls)
            .take_while(|(a, b)| a == b)
            .count();
        wrong.push(format!("tool call {at} or its result differs"));
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{demo::snapshot::Node, run::entry::Turn};

    fn outcome(ids: &[&[u32]], calls: &[&str], after: &Snapshot) -> Outcome {
        let answer = |(step, ids): (usize, &&[u32])| AnswerLog {
            step: step as u64,
            attempt: 0,
            seed: 1,
            prompt_tokens: 5,
            ids: ids.to_vec(),
            end: None,
            turn: Turn::default(),
        };
        Outcome {
            answers: ids.iter().enumerate().map(answer).collect(),
            totals: Totals::default(),
            calls: calls.iter().map(|c| (*c).to_owned()).collect(),
            after: after.clone(),
        }
    }

    #[test]
    fn one_token_one_call_and_one_byte_are_each_found() {
        let before = Snapshot::from([
            ("inbox".to_owned(), Node::Folder),
            (
                "inbox/a.txt".to_owned(),
                Node::File(b"owner: Bo\ncode: 1234\nstate: open\n".to_vec()),
            ),
        ]);
        let right = oracle::expected(&before, FOLDER, REPORT, "H");
        let good = || outcome(&[&[1, 2], &[3]], &["ls"], &right);
        assert!(Verdict::new(&before, "H", &good(), &good()).holds());

        let other = outcome(&[&[1, 2], &[4]], &["ls"], &right);
        let found = Verdict::new(&before, "H", &other, &good());
        assert_eq!(found.tokens, ["answer 1: token 0 differs"]);
        assert!(found.bytes.is_empty() && found.oracle.is_empty() && !found.holds());

        let shorter = outcome(&[&[1, 2]], &["ls"], &right);
        assert_eq!(
            Verdict::new(&before, "H", &shorter, &good()).tokens.len(),
            1
        );

        let called = outcome(&[&[1, 2], &[3]], &["rm"], &right);
        let found = Verdict::new(&before, "H", &called, &good());
        assert_eq!(found.tokens, ["tool call 0 or its result differs"]);

        // The same wrong folder twice: only the oracle knows.
        let mut wrong = right.clone();
        wrong.insert(
            REPORT.to_owned(),
            Node::File(b"H\na | Bo | 1243\n".to_vec()),
        );
        let both = || outcome(&[&[1, 2], &[3]], &["ls"], &wrong);
        let found = Verdict::new(&before, "H", &both(), &both());
        assert!(found.tokens.is_empty() && found.bytes.is_empty());
        assert_eq!(found.oracle.len(), 2);

        let found = Verdict::new(
            &before,
            "H",
            &outcome(&[&[1, 2], &[3]], &["ls"], &wrong),
            &good(),
        );
        assert_eq!((found.bytes.len(), found.oracle.len()), (1, 1));
    }
}
