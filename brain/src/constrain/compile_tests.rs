use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::{
    constrain::CallTool,
    sched::constraint::Constraint,
    text::testing::{ids, tokenizer},
};

const STOPS: [TokenId; 3] = [1, 50, 106];
const TURN: &str = "<|turn>model\n";

pub(in crate::constrain) fn grammars() -> Grammars {
    Grammars::new(tokenizer())
}

fn allowed(matcher: &mut Matcher) -> Mask {
    let mut mask = Mask::none(tokenizer().vocab_size());
    matcher.allowed(&mut mask).unwrap();
    mask
}

/// How far an answer goes along with the form, in tokens, and whether it may end there.
pub(in crate::constrain) fn walk(
    grammar: &Arc<Grammar>,
    prompt: &str,
    answer: &str,
) -> (usize, bool) {
    let mut matcher = grammar.matcher(&ids(prompt), &STOPS);
    let tokens = ids(answer);
    for (index, &token) in tokens.iter().enumerate() {
        if !allowed(&mut matcher).allows(token) {
            matcher.advance(token).unwrap_err();
            return (index, false);
        }
        matcher.advance(token).unwrap();
    }
    let mask = allowed(&mut matcher);
    (tokens.len(), STOPS.iter().any(|&stop| mask.allows(stop)))
}

#[track_caller]
pub(in crate::constrain) fn fits(form: &Form, answer: &str) {
    let grammar = grammars().compile(form).unwrap();
    let (len, ends) = walk(&grammar, TURN, answer);
    let tokens = ids(answer);
    assert!(
        len == tokens.len() && ends,
        "{answer:?} is refused from {:?} on",
        tokenizer().decode(&tokens[len..], false)
    );
}

#[track_caller]
pub(in crate::constrain) fn fails(form: &Form, answer: &str) {
    let grammar = grammars().compile(form).unwrap();
    let (len, ends) = walk(&grammar, TURN, answer);
    assert!(len < ids(answer).len() || !ends, "{answer:?} is taken");
}

#[track_caller]
pub(in crate::constrain) fn refused(form: &Form) -> FormError {
    match grammars().compile(form) {
        Ok(_) => panic!("it compiles"),
        Err(error) => error,
    }
}

fn schema(schema: Value) -> Form {
    Form::JsonSchema(schema)
}

#[test]
fn json_fits_its_schema() {
    let form = schema(json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        },
        "required": ["name", "age"],
        "additionalProperties": false,
    }));
    fits(&form, r#"{"name": "Ann", "age": 7}"#);
    fits(
        &form,
        "{\n  \"name\": \"é😊\",\n  \"age\": 150,\n  \"tags\": [\"a\", \"b\"]\n}",
    );
    fails(&form, r#"{"name": "Ann"}"#);
    fails(&form, r#"{"name": "Ann", "age": 151}"#);
    fails(&form, r#"{"name": "Annabel", "age": 1}"#);
    fails(&form, r#"{"name": "Ann", "age": 1, "tags": ["c"]}"#);
    fails(&form, r#"{"name": "Ann", "age": 1, "more": 1}"#);
    fails(&form, r#"Sure: {"name": "Ann", "age": 7}"#);
    fails(&form, "");
    let any = schema(json!({"type": "object"}));
    fits(&any, r#"{"a": [1, {"b": null}], "c": "<turn>"}"#);
    fails(&any, "[]");
    fits(&schema(json!(true)), "[]");
}

#[test]
fn references_may_refer_to_themselves() {
    let form = schema(json!({
        "$ref": "#/$defs/tree",
        "$defs": {"tree": {"type": "object", "properties": {
            "left": {"$ref": "#/$defs/tree"}, "value": {"type": "number"}},
            "required": ["value"], "additionalProperties": false}},
    }));
    fits(
        &form,
        r#"{"left": {"left": {"value": 1}, "value": 2.5}, "value": -3e7}"#,
    );
    fails(&form, r#"{"left": {}, "value": 1}"#);
}

#[test]
fn regular_expressions_match_the_whole_answer() {
    for form in ["[a-c]+[0-9]{2}", "^[a-c]+[0-9]{2}$"] {
        let form = Form::Regex(form.into());
        fits(&form, "abc12");
        fails(&form, "abc1");
        fails(&form, "abc123");
        fails(&form, "xabc12");
    }
    fits(&Form::Regex("a/b\\\\\"c".into()), "a/b\\\"c");
}

#[test]
fn one_of_the_choices_is_the_answer() {
    let form = Form::Choice(vec!["yes".into(), "no".into(), "a \"q\"\n\\".into()]);
    fits(&form, "yes");
    fits(&form, "a \"q\"\n\\");
    fails(&form, "ye");
    fails(&form, "yesno");
}

#[test]
fn a_grammar_is_followed() {
    let form = Form::Lark("start: \"(\" start \")\" | \"x\"".into());
    fits(&form, "((x))");
    fails(&form, "((x)");
}

#[test]
fn a_thought_comes_first_or_not_at_all() {
    let grammar = grammars()
        .compile(&Form::Choice(vec!["yes".into()]))
        .unwrap();
    let whole = |prompt: &str, answer: &str| {
        let (len, ends) = walk(&grammar, prompt, answer);
        ends && len == ids(answer).len()
    };
    let thought = "<|channel>thought\nis it {\"so\"? <channel|>yes";
    assert!(whole(TURN, thought) && whole(TURN, "yes"));
    assert!(whole(
        "<|turn>model\n<|channel>thought\n",
        "so it is<channel|>yes"
    ));
    assert!(!whole(
        "<|turn>model\n<|channel>thought\n<channel|>",
        thought
    ));
    assert!(whole("<|turn>model\n<|channel>thought\n<channel|>", "yes"));
    // Text that is no conversation has no thoughts.
    assert!(whole("Is it? ", "yes") && !whole("Is it? ", thought));
    for broken in [
        "<|channel>thought\n<turn|>",
        "<|channel>thought\n<|tool_call>",
        "<|channel>a<channel|><|channel>a<channel|>yes",
        "yes<|channel>a<channel|>",
    ] {
        assert!(!whole(TURN, broken), "{broken}");
    }
}

#[test]
fn the_end_comes_where_the_form_is_complete_and_only_there() {
    let grammar = grammars().compile(&Form::Regex("a+b?".into())).unwrap();
    let mut matcher = grammar.matcher(&ids(TURN), &STOPS);
    let ends = |matcher: &mut Matcher| {
        let mask = allowed(matcher);
        STOPS.map(|stop| mask.allows(stop))
    };
    assert_eq!(ends(&mut matcher), [false; 3]);
    matcher.advance(ids("a")[0]).unwrap();
    assert_eq!(
        ends(&mut matcher),
        [true, false, true],
        "a call's end is none"
    );
    matcher.advance(ids("b")[0]).unwrap();
    assert_eq!(allowed(&mut matcher).iter().collect::<Vec<_>>(), [1, 106]);
    assert!(grammar.ends(&[5, 50]).is_empty());
}

#[test]
fn what_cannot_be_kept_to_is_told_by_its_path() {
    for (given, path) in [
        (
            json!({"properties": {"a": {"pattern": "("}}}),
            "properties.a",
        ),
        (json!({"items": {"type": "strung"}}), "items"),
        (
            json!({"properties": {"a": {"$ref": "#/$defs/no"}}}),
            "properties.a",
        ),
        (
            json!({"anyOf": [{"type": "null"}, {"format": "no-such-format", "type": "string"}]}),
            "anyOf[1]",
        ),
        (json!({"type": "object", "contains": {}}), "contains"),
        (json!({"type": "string", "pattern": "a(?=b)"}), ""),
        (json!(false), ""),
        (
            json!({"type": "integer", "multipleOf": 10, "minimum": 11, "maximum": 19}),
            "",
        ),
    ] {
        let error = refused(&schema(given.clone()));
        assert_eq!(error.path, path, "{given}: {error}");
        assert!(!error.message.is_empty());
    }
    for form in [
        Form::Regex("(a".into()),
        Form::Regex("\\bword".into()),
        Form::Regex(String::new()),
        Form::Choice(Vec::new()),
        Form::Lark("start: missing".into()),
        Form::Lark(String::new()),
    ] {
        let error = refused(&form);
        assert!(
            error.path.is_empty() && !error.message.is_empty(),
            "{form:?}"
        );
    }
}

#[test]
fn hostile_forms_are_refused_within_bounds() {
    let chain: serde_json::Map<String, Value> = (0..4000)
        .map(|n| {
            (
                format!("d{n}"),
                json!({"$ref": format!("#/$defs/d{}", n + 1)}),
            )
        })
        .collect();
    let wide: Vec<Value> = (0..2000).map(|n| json!({"const": n})).collect();
    let forms = [
        schema(json!({"$ref": "#/$defs/d0", "$defs": chain})),
        schema(json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})),
        schema(json!({"allOf": vec![json!({"anyOf": wide}); 2]})),
        schema(
            json!({"type": "array", "items": {"type": "array", "minItems": 4096}, "minItems": 4096}),
        ),
        schema(json!({"type": "string", "pattern": "((a{1000}){1000}){1000}"})),
        schema(json!({"x-guidance": {"whitespace_pattern": "("}, "type": "object"})),
        Form::Regex("((a{1,1000}){1,1000}){1,1000}b".into()),
        Form::Regex("(".repeat(10_000)),
        Form::Regex(format!("{}a{}", "(".repeat(30_000), ")".repeat(30_000))),
        Form::Regex("(.*a){20}.*b(.*c){20}".into()),
        Form::Lark(format!(
            "start: {}\"a\"{}",
            "(".repeat(30_000),
            ")".repeat(30_000)
        )),
        Form::Lark("start: start".into()),
        Form::Lark("start: a\na: b\nb: a".into()),
        Form::Lark(format!("start: \"{}\"", "a".repeat(70_000))),
        Form::Lark("start: %json {\"$ref\": \"http://example.org/\"}".into()),
    ];
    for form in forms {
        // Some compile, and then a token must come of it; none may do harm.
        if let Ok(grammar) = grammars().compile(&form) {
            let mut matcher = grammar.matcher(&[], &STOPS);
            for _ in 0..20 {
                let mut mask = Mask::none(tokenizer().vocab_size());
                if matcher.allowed(&mut mask).is_err() {
                    break;
                }
                let Some(token) = mask.iter().find(|id| !STOPS.contains(id)) else {
                    break;
                };
                if matcher.advance(token).is_err() {
                    break;
                }
            }
        }
    }
}

#[test]
fn a_compiled_form_is_found_again() {
    let grammars = grammars();
    let form = |n: usize| Form::Choice(vec![format!("c{n}")]);
    let first = grammars.compile(&form(0)).unwrap();
    assert!(Arc::ptr_eq(&first, &grammars.compile(&form(0)).unwrap()));
    for n in 1..=KEPT {
        grammars.compile(&form(n)).unwrap();
    }
    assert!(!Arc::ptr_eq(&first, &grammars.compile(&form(0)).unwrap()));
}

#[test]
fn a_form_survives_being_kept_as_text() {
    for form in [
        schema(json!({"b": 1, "a": {"type": "string"}})),
        Form::Choice(vec!["a".into()]),
        Form::Calls(Calls {
            tools: vec![CallTool {
                name: "f".into(),
                parameters: Some(json!({})),
                strict: true,
                path: String::new(),
            }],
            required: true,
            single: false,
        }),
    ] {
        assert_eq!(Form::from_text(&form.to_text()), Some(form));
    }
    assert_eq!(Form::from_text("{"), None);
}

proptest! {
    /// Going back leads where going straight there does, thoughts and dead ends included.
    #[test]
    fn going_back_is_never_having_gone(
        choices in prop::collection::vec((any::<prop::sample::Index>(), 0usize..4), 1..40),
        start in prop::sample::select(vec![TURN, "", "<|channel>"]),
    ) {
        static GRAMMAR: std::sync::OnceLock<Arc<Grammar>> = std::sync::OnceLock::new();
        let grammar = GRAMMAR.get_or_init(|| {
            let form = schema(json!({"type": "object", "properties": {
                "a": {"type": "integer"}, "b": {"enum": ["xy", "xz"]}}, "required": ["a", "b"],
                "additionalProperties": false}));
            grammars().compile(&form).unwrap()
        });
        let prompt = ids(start);
        let mut matcher = grammar.matcher(&prompt, &STOPS);
        let mut path: Vec<TokenId> = Vec::new();
        for (choice, back) in choices {
            let mask = allowed(&mut matcher);
            let open: Vec<TokenId> = mask.iter().filter(|id| !STOPS.contains(id)).collect();
            if let Some(&token) = open.get(choice.index(open.len().max(1))) {
                matcher.advance(token).unwrap();
                path.push(token);
            } else {
                prop_assert!(mask.allows(106), "nothing may come");
            }
            // A token that is not allowed is not taken.
            matcher.advance(0).unwrap_err();
            let back = back.min(path.len());
            matcher.rewind(back).unwrap();
            path.truncate(path.len() - back);
            let mut straight = grammar.matcher(&prompt, &STOPS);
            path.iter().for_each(|&token| straight.advance(token).unwrap());
            prop_assert_eq!(allowed(&mut matcher), allowed(&mut straight));
        }
    }
}

#[test]
fn a_form_that_no_text_fits_is_refused_in_words() {
    for form in [
        schema(json!({"$ref": "#"})),
        schema(json!({
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            "$ref": "#/$defs/a",
        })),
        Form::Lark("start: start start".into()),
    ] {
        assert_eq!(refused(&form).message, NOTHING_FITS);
    }
}
