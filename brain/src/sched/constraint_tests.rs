use super::*;

/// Digits that each differ from the one before, at most four of them; 9 is the end.
struct Digits(Vec<TokenId>);

impl Constraint for Digits {
    fn allowed(&mut self, mask: &mut Mask) -> Result<(), Broken> {
        match self.0.len() {
            0..4 => (0..9)
                .filter(|id| self.0.last() != Some(id))
                .for_each(|id| mask.insert(id)),
            _ => mask.insert(9),
        }
        Ok(())
    }

    fn advance(&mut self, token: TokenId) -> Result<(), Broken> {
        let mut mask = Mask::none(10);
        self.allowed(&mut mask)?;
        if !mask.allows(token) || self.0.last() == Some(&5) {
            return Err(Broken(format!("not {token}")));
        }
        self.0.push(token);
        Ok(())
    }

    fn rewind(&mut self, count: usize) -> Result<(), Broken> {
        assert_ne!(self.0.last(), Some(&8), "8 is never taken back");
        self.0.truncate(self.0.len() - count);
        Ok(())
    }
}

fn params() -> SamplingParams {
    SamplingParams {
        stop_tokens: vec![9],
        suppressed: vec![3],
        ..SamplingParams::greedy(9)
    }
}

fn constrained(received: &[TokenId]) -> Constrained {
    Constrained::new(Box::new(Digits(Vec::new())), &params(), 10, received).unwrap()
}

#[test]
fn a_draft_that_breaks_the_constraint_is_cut_and_every_row_has_its_mask() {
    let mut digits = constrained(&[1]);
    let checked = digits.check(&params(), &[2, 4, 4, 6], 8, 1);
    assert_eq!(
        (checked.drafts, checked.forced, checked.cut),
        (vec![2, 4], 0, true)
    );
    let masks = digits.masks(2);
    assert_eq!(masks.len(), 3);
    for (mask, last) in masks.iter().zip([1, 2, 4]) {
        assert!(!mask.allows(last) && mask.allows(7) && !mask.allows(3) && !mask.allows(9));
    }
    // The constraint is where it was, whatever was looked at ahead.
    digits.advance(&params(), [2], 2).unwrap();
    assert!(!digits.masks(0)[0].allows(2));
}

#[test]
fn no_row_is_spent_behind_an_end() {
    let mut digits = constrained(&[1, 2, 4]);
    let checked = digits.check(&params(), &[7, 9, 9], 8, 3);
    assert_eq!((checked.drafts, checked.cut), (vec![7], false));
    assert_eq!(digits.masks(1)[1].only(), Some(9));
}

#[test]
fn the_only_token_that_may_come_is_the_draft() {
    let two_alone = SamplingParams {
        suppressed: vec![0, 1, 2, 3, 4, 5, 8],
        ..params()
    };
    let mut digits = Constrained::new(Box::new(Digits(vec![7])), &two_alone, 10, &[]).unwrap();
    let checked = digits.check(&two_alone, &[1], 8, 0);
    assert_eq!(
        (checked.drafts, checked.forced, checked.cut),
        (vec![6, 7, 6], 3, true)
    );
    let none = digits.check(&two_alone, &[1], 0, 0);
    assert_eq!((none.drafts.len(), none.cut), (0, true));
}

#[test]
fn an_end_comes_early_where_nothing_else_may_come() {
    let patient = SamplingParams {
        min_tokens: 8,
        ..params()
    };
    let mut digits = constrained(&[1, 2, 4]);
    digits.advance(&patient, [7], 4).unwrap();
    assert_eq!(digits.masks(0)[0].only(), Some(9));
}

#[test]
fn tokens_that_do_not_fit_are_told_by_their_place() {
    let misfit = |received: &[TokenId]| {
        Constrained::new(Box::new(Digits(Vec::new())), &params(), 10, received).unwrap_err()
    };
    assert_eq!(misfit(&[1, 1]), Misfit::Received(1));
    let nothing = SamplingParams {
        suppressed: (0..10).collect(),
        ..params()
    };
    let error = Constrained::new(Box::new(Digits(Vec::new())), &nothing, 10, &[]).unwrap_err();
    assert!(matches!(error, Misfit::Start(Broken(why)) if why.contains("no token")));
}

#[test]
fn one_that_panics_ends_its_sequence_with_the_next_token() {
    let mut digits = constrained(&[1]);
    // It cannot advance behind a 5, and panics when it takes an 8 back.
    assert_eq!(digits.check(&params(), &[5, 6], 8, 1).drafts, [5]);
    assert_eq!(digits.check(&params(), &[8], 8, 1).drafts, [8]);
    let error = digits.advance(&params(), [2], 2).unwrap_err();
    assert!(error.0.contains("panicked"), "{error}");
}
