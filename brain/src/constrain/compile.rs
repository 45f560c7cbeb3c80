//! Forms compiled to grammars, for one vocabulary, within bounds.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use llguidance::{
    ParserFactory,
    api::{ParserLimits, TopLevelGrammar},
    earley::SlicedBiasComputer,
};
use serde_json::{Value, json};
use toktrie::{InferenceCapabilities, TokEnv};

use super::{Calls, Form, FormError, Matcher, calls, schema, terminals, vocabulary};
use crate::{
    sched::{mask::Mask, types::TokenId},
    text::{markers::Markers, tokenizer::Tokenizer},
};

/// Bytes of a regular expression or of a Lark grammar, at most.
const MAX_TEXT: usize = 64 << 10;
/// Texts of a choice, at most, and their bytes.
const MAX_CHOICES: usize = 4096;
/// Compiled grammars that are kept for the next request with the same form.
const KEPT: usize = 32;
/// The compiler recurses; what it may recurse into is bounded, and fits this.
const STACK: usize = 256 << 20;
/// Compilations that looking for the keyword at fault may take.
const SEARCHES: usize = 64;

/// Compiles forms for one checkpoint.
pub struct Grammars {
    tokenizer: Arc<Tokenizer>,
    /// Made with the first form: a large vocabulary takes a moment.
    factory: OnceLock<Result<ParserFactory, String>>,
    kept: Mutex<VecDeque<(Arc<str>, Arc<Grammar>)>>,
}

/// A form compiled for a vocabulary.
pub struct Grammar {
    /// Never advanced: every answer starts from a copy of its own.
    start: Mutex<llguidance::Matcher>,
    pub(super) markers: Markers,
    /// What a thought may consist of.
    pub(super) text: Mask,
    /// Tokens that can end such an answer.
    ends: Vec<TokenId>,
}

impl Grammar {
    pub(super) fn fresh(&self) -> llguidance::Matcher {
        let start = self.start.lock().unwrap_or_else(PoisonError::into_inner);
        start.deep_clone()
    }

    /// Those of a request's stop tokens that can end such an answer; without any it has no end.
    pub fn ends(&self, stop_tokens: &[TokenId]) -> Vec<TokenId> {
        let mut ends = self.ends.clone();
        ends.retain(|id| stop_tokens.contains(id));
        ends
    }

    /// At the beginning of the answer to a prompt.
    pub fn matcher(self: &Arc<Self>, prompt: &[TokenId], stop_tokens: &[TokenId]) -> Matcher {
        Matcher::new(self.clone(), prompt, self.ends(stop_tokens))
    }
}

impl Grammars {
    /// Of this tokenizer.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self {
            tokenizer,
            factory: OnceLock::new(),
            kept: Mutex::default(),
        }
    }

    /// Compiles a form, or finds it compiled. Takes milliseconds: call it on a blocking thread.
    ///
    /// # Errors
    /// What cannot be kept to, with its path in the form.
    pub fn compile(&self, form: &Form) -> Result<Arc<Grammar>, FormError> {
        let text = form.to_text();
        if let Some(grammar) = self.find(&text) {
            return Ok(grammar);
        }
        let grammar = Arc::new(self.compile_anew(form)?);
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() == KEPT {
            kept.pop_front();
        }
        kept.push_back((text, grammar.clone()));
        Ok(grammar)
    }

    fn find(&self, text: &str) -> Option<Arc<Grammar>> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let at = kept.iter().position(|(known, _)| **known == *text)?;
        let found = kept.remove(at)?;
        let grammar = found.1.clone();
        kept.push_back(found);
        Some(grammar)
    }

    fn compile_anew(&self, form: &Form) -> Result<Grammar, FormError> {
        let markers = *self.tokenizer.markers();
        let mut ends = vec![markers.eos, markers.turn_close];
        let start = match form {
            Form::JsonSchema(given) => self.json(given)?,
            Form::Regex(regex) => self.regex(regex)?,
            Form::Choice(texts) => self.choice(texts)?,
            Form::Lark(lark) => {
                check_length(lark)?;
                self.run(|factory| build(factory, TopLevelGrammar::from_lark(lark.clone())))
                    .map_err(|why| FormError::new("", why))?
            }
            Form::Calls(calls) => {
                ends.push(markers.response_open);
                self.calls(calls, None)?
            }
            Form::JsonOrCalls(given, calls) => {
                ends.push(markers.response_open);
                // Whatever is wrong with the schema is told of the schema alone.
                self.json(given)?;
                self.calls(calls, Some(&schema::cleaned(given)))?
            }
        };
        Ok(Grammar {
            start: Mutex::new(start),
            markers,
            text: vocabulary::text_tokens(&self.tokenizer, self.tokenizer.vocab_size()),
            ends,
        })
    }

    fn json(&self, given: &Value) -> Result<llguidance::Matcher, FormError> {
        schema::check(given, "", true)?;
        let given = schema::cleaned(given);
        self.run(|factory| {
            build(factory, json_grammar(given.clone())).map_err(|why| {
                let root = given.clone();
                let mut searches = SEARCHES;
                let path = narrowed(factory, &root, &given, String::new(), &mut searches);
                (path, why)
            })
        })
        .map_err(|(path, why)| FormError::new(path, why))
    }

    fn regex(&self, regex: &str) -> Result<llguidance::Matcher, FormError> {
        check_length(regex)?;
        if regex.is_empty() {
            return Err(FormError::new("", "the regular expression is empty"));
        }
        self.run(|factory| build(factory, TopLevelGrammar::from_regex(regex)))
            .map_err(|why| FormError::new("", why))
    }

    fn choice(&self, texts: &[String]) -> Result<llguidance::Matcher, FormError> {
        let bytes: usize = texts.iter().map(String::len).sum();
        if texts.is_empty() || texts.len() > MAX_CHOICES || bytes > MAX_TEXT {
            let message = format!(
                "{} texts of {bytes} bytes: give 1 to {MAX_CHOICES} of {MAX_TEXT} bytes at most",
                texts.len()
            );
            return Err(FormError::new("", message));
        }
        if let Some(at) = texts.iter().position(String::is_empty) {
            let message = "an empty text is no choice";
            return Err(FormError::new(format!("[{at}]"), message));
        }
        let literals: Vec<String> = texts.iter().map(|text| terminals::literal(text)).collect();
        let lark = format!("start: {}", literals.join(" | "));
        self.run(|factory| build(factory, TopLevelGrammar::from_lark(lark)))
            .map_err(|why| FormError::new("", why))
    }

    fn calls(&self, given: &Calls, json: Option<&Value>) -> Result<llguidance::Matcher, FormError> {
        let markers = self.tokenizer.markers();
        let json = json.map(with_options);
        let lark = calls::grammar(given, json.as_ref(), markers)?;
        self.run(|factory| {
            build(factory, TopLevelGrammar::from_lark(lark)).map_err(|why| {
                // Whichever tool cannot be compiled alone is the one at fault.
                let alone = |tool: &&super::CallTool| {
                    let calls = Calls {
                        tools: vec![(*tool).clone()],
                        ..given.clone()
                    };
                    let lark = calls::grammar(&calls, None, markers).unwrap_or_default();
                    build(factory, TopLevelGrammar::from_lark(lark)).is_err()
                };
                let path = given.tools.iter().take(SEARCHES).find(alone);
                let path = path.map_or("", |tool| &tool.path).to_owned();
                (path, why)
            })
        })
        .map_err(|(path, why)| FormError::new(path, why))
    }

    /// Runs the compiler where it has the stack that it may need.
    fn run<T: Send, E: Send + From<Refused>>(
        &self,
        work: impl FnOnce(&ParserFactory) -> Result<T, E> + Send,
    ) -> Result<T, E> {
        let refused = |why: &str| Err(E::from(Refused(why.to_owned())));
        std::thread::scope(|scope| {
            let compiler = std::thread::Builder::new()
                .name("grammar".into())
                .stack_size(STACK)
                .spawn_scoped(scope, || match self.factory() {
                    Ok(factory) => work(factory),
                    Err(why) => refused(why),
                });
            match compiler.map(std::thread::ScopedJoinHandle::join) {
                Ok(Ok(result)) => result,
                Ok(Err(_)) => refused("the compiler of grammars panicked: this is a bug"),
                Err(error) => refused(&format!("no thread to compile it on: {error}")),
            }
        })
    }

    fn factory(&self) -> Result<&ParserFactory, &str> {
        let made = self.factory.get_or_init(|| {
            let env: TokEnv = vocabulary::Vocabulary::of(&self.tokenizer);
            let slices = SlicedBiasComputer::json_slices();
            let mut factory = ParserFactory::new(&env, InferenceCapabilities::default(), &slices)
                .map_err(|error| first_line(&error))?;
            factory.quiet();
            *factory.limits_mut() = limits();
            Ok(factory)
        });
        made.as_ref().map_err(String::as_str)
    }
}

/// What a grammar may cost to compile, and a mask to compute: some tens of milliseconds, and some
/// tens of megabytes, at the worst.
fn limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 2000,
        initial_lexer_fuel: 1_000_000,
        step_lexer_fuel: 200_000,
        step_max_items: 50_000,
        max_lexer_states: 20_000,
        max_grammar_size: 200_000,
        precompute_large_lexemes: false,
        verbose_errors: false,
    }
}

/// Why the compiler did not even start.
struct Refused(String);

impl From<Refused> for String {
    fn from(refused: Refused) -> Self {
        refused.0
    }
}

impl From<Refused> for (String, String) {
    fn from(refused: Refused) -> Self {
        (String::new(), refused.0)
    }
}

fn build(factory: &ParserFactory, grammar: TopLevelGrammar) -> Result<llguidance::Matcher, String> {
    let parser = factory
        .create_parser(grammar)
        .map_err(|error| first_line(&error))?;
    let mut matcher = llguidance::Matcher::new(Ok(parser));
    // A grammar that no text fits shows here, if not before.
    match matcher.compute_mask_or_eos() {
        Ok(_) => Ok(matcher),
        Err(error) => Err(match first_line(&error) {
            state if state.contains(NO_WAY_ON) => NOTHING_FITS.to_owned(),
            why => why,
        }),
    }
}

/// How the library says that nothing can come next.
const NO_WAY_ON: &str = "NoExtensionBias";
const NOTHING_FITS: &str =
    "no text fits this form: it refers to itself without an end, or contradicts itself";

fn json_grammar(schema: Value) -> TopLevelGrammar {
    TopLevelGrammar::from_json_schema(with_options(&schema))
}

/// A schema with what the compiler is to know, whatever the client says of it.
fn with_options(schema: &Value) -> Value {
    let mut schema = match schema {
        Value::Bool(true) => json!({}),
        given => given.clone(),
    };
    if let Some(object) = schema.as_object_mut() {
        // Whitespace is the model's to choose, in measure: a loop of it would never end.
        let options = json!({
            "whitespace_pattern": r"[ \n\r\t]{1,64}",
            "coerce_one_of": true,
        });
        object.insert("x-guidance".into(), options);
    }
    schema
}

/// The path of the smallest part of a schema that cannot be compiled by itself.
fn narrowed(
    factory: &ParserFactory,
    root: &Value,
    schema: &Value,
    path: String,
    searches: &mut usize,
) -> String {
    let Some(object) = schema.as_object() else {
        return path;
    };
    for (below, part) in schema::inside(object, &path).unwrap_or_default() {
        let Some(left) = searches.checked_sub(1) else {
            return path;
        };
        *searches = left;
        let mut alone = part.clone();
        if let Some(alone) = alone.as_object_mut() {
            for definitions in ["$defs", "definitions"] {
                if let Some(known) = root.get(definitions) {
                    alone.insert(definitions.into(), known.clone());
                }
            }
        }
        if build(factory, json_grammar(alone)).is_err() {
            return narrowed(factory, root, part, below, searches);
        }
    }
    path
}

fn check_length(text: &str) -> Result<(), FormError> {
    if text.len() <= MAX_TEXT {
        return Ok(());
    }
    let message = format!(
        "it has {} bytes, at most {MAX_TEXT} are compiled",
        text.len()
    );
    Err(FormError::new("", message))
}

fn first_line(error: &anyhow::Error) -> String {
    let text = format!("{error:#}");
    let line = text.lines().find(|line| !line.trim().is_empty());
    format!("{:.300}", line.unwrap_or("it cannot be compiled"))
}

#[cfg(test)]
#[path = "compile_tests.rs"]
pub(super) mod tests;
