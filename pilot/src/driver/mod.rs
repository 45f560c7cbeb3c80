//! Commits, then acts.
//!
//! The loop is small: ask [`decide`] what comes next, perform it, commit the outcome. Three commits
//! wait for the disk (an answer, a tool's intent, a tool's result), so that nothing is shown or done
//! that a power cut could take back; the others can be had again and are written lazily. A kill at
//! any instant leaves a journal from which the same loop goes on.

mod answer;
mod calls;
pub mod failpoint;
mod ledger;
mod render;
mod wait;

use std::{collections::BTreeSet, path::PathBuf, sync::Arc};

use tokio_util::sync::CancellationToken;

use crate::{
    brain::{BrainClient, BrainError, Model},
    journal::{Durability, Journal, JournalError},
    run::{
        decide::{Effect, decide},
        entry::{Created, Entry, Limits, ModelPin, PauseReason, RunId, SamplingChoice},
        event::{Observer, RunEvent, Totals},
        state::{State, Status},
    },
    tools::Toolbox,
};

use failpoint::FailPoints;
use ledger::Ledger;

/// Largest context that is used without being asked for, in tokens.
const DEFAULT_CONTEXT: u32 = 65_536;

/// Why a run could not go on in this process. Its journal is as it was.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// The journal.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The brain, while a run was being created.
    #[error(transparent)]
    Brain(#[from] BrainError),
    /// The journal holds entries in an order that no pilot writes.
    #[error("run {run}: entry {sequence} does not follow from those before it: {reason}")]
    History {
        /// The run.
        run: RunId,
        /// Which entry.
        sequence: u64,
        /// Why not.
        reason: String,
    },
    /// What was asked for cannot be.
    #[error("{0}")]
    Impossible(String),
    /// A bug: an effect's thread died.
    #[error("internal error: {0}")]
    Internal(String),
}

/// What a driver works with.
#[derive(Clone)]
pub struct Parts {
    /// Where facts are kept.
    pub journal: Arc<dyn Journal>,
    /// The model.
    pub brain: BrainClient,
    /// The tools.
    pub tools: Toolbox,
    /// Folder of this run for output of supervised commands.
    pub spool: PathBuf,
    /// Told what happens.
    pub observer: Arc<dyn Observer>,
    /// Where to die, in tests.
    pub fail: Arc<FailPoints>,
    /// Fires when the run is to be paused.
    pub cancel: CancellationToken,
}

/// A new run as it is asked for.
#[derive(Clone, Debug)]
pub struct NewRun {
    /// Its id.
    pub run: RunId,
    /// What to do.
    pub goal: String,
    /// System prompt.
    pub system: String,
    /// An existing folder, absolute.
    pub workspace: PathBuf,
    /// Seed.
    pub seed: u64,
    /// Context limit in tokens; 0: what the model can do, but 65,536 at most.
    pub max_context: u32,
    /// Room for an answer; 0: a sixteenth of the context, from 256 to 8,192.
    pub answer_reserve: u32,
    /// Budgets.
    pub limits: Limits,
    /// Sampling.
    pub sampling: SamplingChoice,
    /// Shell commands are allowed.
    pub allow_bash: bool,
    /// Answers are kept to calls that the tools take.
    pub constrain_calls: bool,
}

/// How a run is taken up again.
#[derive(Clone, Debug, Default)]
pub struct Resume {
    /// New limits; `None`: as they were.
    pub limits: Option<Limits>,
    /// New context limit in tokens, 0 as for [`NewRun::max_context`]; `None`: as it was.
    pub max_context: Option<u32>,
    /// Go on with another model than the run is bound to.
    pub accept_new_fingerprint: bool,
}

/// How a run left this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It is over.
    Finished(String),
    /// It can be resumed.
    Paused(PauseReason),
}

/// Drives one run.
pub struct Driver {
    parts: Parts,
    ledger: Ledger,
    resume: Option<Resume>,
    /// The call whose intent this very process journaled: it is not in doubt.
    fresh_intent: Option<u64>,
    /// The view was told of the brain since it was last away.
    greeted: bool,
    /// Shapes of answers (stop token, with calls) that the brain could append to.
    followed: BTreeSet<(Option<u32>, bool)>,
}

/// Why an effect was not carried through.
enum Halt {
    /// Asked to stop.
    Stop,
    /// The run cannot go on by itself.
    Pause(PauseReason),
    /// This process cannot go on.
    Fatal(DriverError),
}

impl From<DriverError> for Halt {
    fn from(error: DriverError) -> Self {
        Self::Fatal(error)
    }
}

impl Driver {
    /// Begins a run. The brain must answer, since the run is bound to its model; nothing is journaled
    /// before it has.
    pub async fn create(parts: Parts, new: NewRun) -> Result<Self, DriverError> {
        let constrain_calls = new.constrain_calls;
        let created = plan(&parts.brain, &parts.tools, new).await?;
        let journal = Arc::clone(&parts.journal);
        let ledger = Ledger::create(journal, created, constrain_calls).await?;
        Ok(Self::new(parts, ledger, None))
    }

    /// Takes a run up again.
    pub async fn open(parts: Parts, run: RunId, resume: Resume) -> Result<Self, DriverError> {
        let ledger = Ledger::open(Arc::clone(&parts.journal), run).await?;
        Ok(Self::new(parts, ledger, Some(resume)))
    }

    fn new(parts: Parts, ledger: Ledger, resume: Option<Resume>) -> Self {
        Self {
            parts,
            ledger,
            resume,
            fresh_intent: None,
            greeted: false,
            followed: BTreeSet::new(),
        }
    }

    /// The run's state.
    pub fn state(&self) -> &State {
        self.ledger.state()
    }

    /// Runs until the run is over, paused, or this process cannot go on.
    pub async fn run(mut self) -> Result<Ending, DriverError> {
        self.announce();
        if let Some(resume) = self.resume.take()
            && !matches!(self.state().status, Status::Finished(_))
        {
            self.take_up(resume).await?;
        }
        loop {
            let effect = decide(self.state());
            if effect == Effect::Rest {
                return Ok(self.ending());
            }
            let outcome = if self.parts.cancel.is_cancelled() && !is_last(&effect) {
                Err(Halt::Stop)
            } else {
                self.perform(effect).await
            };
            let reason = match outcome {
                Ok(()) => continue,
                Err(Halt::Stop) => PauseReason::Stopped,
                Err(Halt::Pause(reason)) => reason,
                Err(Halt::Fatal(error)) => return Err(error),
            };
            self.pause(reason).await?;
        }
    }

    async fn perform(&mut self, effect: Effect) -> Result<(), Halt> {
        match effect {
            Effect::StartPrompt {
                first_exchange,
                note,
            } => self.start_prompt(first_exchange, note).await,
            Effect::Ask {
                step,
                attempt,
                seed,
                prompt_tokens,
                prompt_hash,
            } => {
                self.parts.fail.hit("before-ask");
                let asked = Entry::AnswerAsked {
                    step,
                    attempt,
                    seed,
                    prompt_tokens,
                    prompt_hash,
                };
                Ok(self.ledger.commit(vec![asked], Durability::Lazy).await?)
            }
            Effect::Stream => self.stream().await,
            Effect::Prepare { call, request } => self.prepare(call, request).await,
            Effect::Settle(intent) => self.settle(intent).await,
            Effect::AppendResults(results) => self.append_results(results).await,
            Effect::Nudge => self.nudge().await,
            Effect::Finish { summary } => {
                let entry = Entry::Finished {
                    summary: summary.clone(),
                };
                self.ledger.commit(vec![entry], Durability::Synced).await?;
                let totals = self.totals();
                self.tell(&RunEvent::Finished { summary, totals });
                Ok(())
            }
            Effect::Pause(reason) => Err(Halt::Pause(reason)),
            Effect::Rest => Ok(()),
        }
    }

    /// First events of a process, and the entry that says that it took the run up.
    async fn take_up(&mut self, resume: Resume) -> Result<(), DriverError> {
        let limits = resume
            .limits
            .unwrap_or_else(|| self.state().created.limits.clone());
        let same_tools = tools_hash(&self.parts.tools) == self.state().created.tools_hash;
        let model = match self.newly_accepted(resume.accept_new_fingerprint).await {
            Ok(model) => model,
            Err(Halt::Fatal(error)) => return Err(error),
            Err(Halt::Stop) => return self.pause(PauseReason::Stopped).await,
            Err(Halt::Pause(reason)) => return self.pause(reason).await,
        };
        let context = self.newly_limited(resume.max_context, model.as_ref())?;
        let mut entries = vec![Entry::Resumed { limits, model }];
        entries.extend(context.map(|limit| Entry::ContextChanged { limit }));
        self.ledger.commit(entries, Durability::Synced).await?;
        if !same_tools {
            self.pause(PauseReason::OtherTools).await?;
        }
        Ok(())
    }

    /// The context limit from now on, if it is another than before.
    fn newly_limited(
        &self,
        asked: Option<u32>,
        model: Option<&ModelPin>,
    ) -> Result<Option<u32>, DriverError> {
        let Some(asked) = asked else { return Ok(None) };
        let created = &self.state().created;
        let model = model.unwrap_or(&created.model);
        let limit = context_limit(asked, model.max_model_len)?;
        expect_reserve(created.answer_reserve, limit)?;
        Ok((limit != created.context_limit).then_some(limit))
    }

    /// The model the run is bound to from now on, if the user accepts another and it is another.
    async fn newly_accepted(&mut self, accept: bool) -> Result<Option<ModelPin>, Halt> {
        if !accept {
            return Ok(None);
        }
        let model = self.model().await?;
        let pin = &self.state().created.model;
        if model.fingerprint == pin.fingerprint {
            return Ok(None);
        }
        if model.template_hash != pin.template_hash {
            // The prompt's tokens would mean something else.
            return Err(Halt::Fatal(DriverError::Impossible(format!(
                "run {} cannot go on with model {}: its chat template differs from that of {}; \
                 start a new run",
                self.ledger.run(),
                model.name,
                pin.name
            ))));
        }
        Ok(Some(pin_of(&model)))
    }

    async fn pause(&mut self, reason: PauseReason) -> Result<(), DriverError> {
        if matches!(self.state().status, Status::Running) {
            let entry = Entry::Paused(reason.clone());
            self.ledger.commit(vec![entry], Durability::Synced).await?;
        }
        let totals = self.totals();
        self.tell(&RunEvent::Paused {
            reason: reason.to_string(),
            totals,
        });
        Ok(())
    }

    fn ending(&self) -> Ending {
        match &self.state().status {
            Status::Finished(summary) => Ending::Finished(summary.clone()),
            Status::Paused(reason) => Ending::Paused(reason.clone()),
            // `decide` rests in these two alone.
            Status::Running => Ending::Paused(PauseReason::Stopped),
        }
    }

    fn announce(&self) {
        let state = self.state();
        self.tell(&RunEvent::Opened {
            run: self.ledger.run().clone(),
            goal: state.created.goal.clone(),
            resumed: self.resume.is_some(),
            totals: state.totals,
            context_limit: state.context_limit(),
        });
    }

    fn tell(&self, event: &RunEvent) {
        self.parts.observer.observe(event);
    }

    fn totals(&self) -> Totals {
        self.state().totals
    }
}

/// The end of a run is journaled even when it is asked to stop at that moment.
fn is_last(effect: &Effect) -> bool {
    matches!(effect, Effect::Finish { .. } | Effect::Pause(_))
}

/// What a run's first entry will be, or why there can be no such run: asks the brain for its model
/// and for the length of the shortest prompt, and writes nothing.
pub async fn plan(
    brain: &BrainClient,
    tools: &Toolbox,
    new: NewRun,
) -> Result<Created, DriverError> {
    let model = brain.model().await?;
    let created = created(tools, new, &model)?;
    let head = render::head(tools, &created, false);
    let needed = brain.render(head, Vec::new()).await?.len();
    let (limit, reserve) = (created.context_limit, created.answer_reserve);
    if needed.saturating_add(reserve as usize) > limit as usize {
        let most = model.max_model_len;
        return Err(DriverError::Impossible(format!(
            "system prompt, tools and goal take {needed} tokens and an answer {reserve}, more than the \
             context of {limit}; shorten the goal, or raise --max-context (the model takes {most})"
        )));
    }
    Ok(created)
}

/// The context limit of a run that asked for `asked`, 0 for none, with a model that takes `most`.
fn context_limit(asked: u32, most: u32) -> Result<u32, DriverError> {
    match asked {
        0 => Ok(most.min(DEFAULT_CONTEXT)),
        asked if asked > most => Err(DriverError::Impossible(format!(
            "--max-context {asked}: the model takes {most} at most"
        ))),
        asked => Ok(asked),
    }
}

fn expect_reserve(reserve: u32, limit: u32) -> Result<(), DriverError> {
    if reserve < limit {
        return Ok(());
    }
    Err(DriverError::Impossible(format!(
        "room of {reserve} tokens for an answer leaves nothing of a context of {limit}; change \
         --max-context or --answer-reserve"
    )))
}

fn created(tools: &Toolbox, new: NewRun, model: &Model) -> Result<Created, DriverError> {
    let context_limit = context_limit(new.max_context, model.max_model_len)?;
    let answer_reserve = match new.answer_reserve {
        0 => (context_limit / 16).clamp(256, 8192),
        asked => asked,
    };
    expect_reserve(answer_reserve, context_limit)?;
    let Some(workspace) = new.workspace.to_str() else {
        let place = new.workspace.display();
        return Err(DriverError::Impossible(format!(
            "workspace {place}: not UTF-8"
        )));
    };
    Ok(Created {
        run: new.run,
        goal: new.goal,
        system: new.system,
        workspace: workspace.to_owned(),
        seed: new.seed,
        context_limit,
        answer_reserve,
        limits: new.limits,
        sampling: new.sampling,
        allow_bash: new.allow_bash,
        tools_hash: tools_hash(tools),
        model: pin_of(model),
    })
}

fn pin_of(model: &Model) -> ModelPin {
    ModelPin {
        name: model.name.clone(),
        fingerprint: model.fingerprint.clone(),
        template_hash: model.template_hash.clone(),
        max_model_len: model.max_model_len,
    }
}

/// BLAKE3 over what the model is told of the tools.
fn tools_hash(tools: &Toolbox) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    for tool in tools.declarations() {
        for part in [&tool.name, &tool.description, &tool.parameters_json] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part.as_bytes());
        }
    }
    *hasher.finalize().as_bytes()
}
