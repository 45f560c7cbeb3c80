//! The step arena on the card: what changes from step to step lies at fixed addresses, so that a
//! recorded round finds it there.
//!
//! The host fills a page-locked copy and sends it in one piece before the round; the results come
//! back in one piece after it.

use std::ops::Range;

use marathon_kernels::{
    abi::{DevicePtr, RECENT, SampleParams},
    device::DeviceError,
    host::Pinned,
};

use super::{
    card::{Card, Region},
    groups::{Cut, group},
    lists,
};
use crate::{
    backend::{
        arena::{Arena, RowSet, Span},
        ops::Rows,
    },
    model::plan::Kind,
    sched::types::TokenId,
};

/// Words of a sequence's parameters.
const PARAMS: usize = size_of::<SampleParams>() / 4;
/// Log-probabilities that a row can report: its own and the likeliest.
pub(super) const LOGPROBS: usize = 64;
/// Words of a row's log-probabilities.
pub(super) const LOGPROB_PITCH: usize = 2 * LOGPROBS;

/// How much of everything there can be in a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) rows: usize,
    pub(super) out_rows: usize,
    pub(super) seqs: usize,
    pub(super) drafts: usize,
    /// Positions that a row can have, and one more.
    pub(super) positions: usize,
    pub(super) window: usize,
    pub(super) vocab: usize,
    /// Slots of a page.
    pub(super) page: usize,
}

impl Sizes {
    /// Pages of a sequence's table.
    pub(super) fn table(&self, kind: Kind) -> usize {
        let whole = self.positions.div_ceil(self.page) + 1;
        match kind {
            Kind::Full => whole,
            Kind::Sliding => whole.min((self.window + self.rows).div_ceil(self.page) + 3),
        }
    }

    /// Words for all sequences' lists: a request's history, its biases, bans and stops, and the
    /// masks of a grammar, one for each row that chooses.
    fn lists(&self) -> usize {
        let masks = (self.drafts + 1) * self.vocab.div_ceil(32);
        self.seqs * (2 * self.vocab.min(self.positions) + self.vocab + masks + 4096)
    }
}

/// A run of words in the arena.
#[derive(Clone, Copy, Debug)]
struct Field {
    start: usize,
    len: usize,
}

impl Field {
    fn range(self) -> Range<usize> {
        self.start..self.start + self.len
    }
}

/// Hands out fields one behind the other, each on a 64-byte line.
struct Ruler(usize);

impl Ruler {
    fn field(&mut self, len: usize) -> Field {
        let start = self.0;
        self.0 = (start + len).next_multiple_of(16);
        Field { start, len }
    }
}

/// Rows of one kind, with their spans.
#[derive(Clone, Copy, Debug)]
struct RowFields {
    token: Field,
    position: Field,
    end: Field,
    seq: Field,
    spans: Field,
}

impl RowFields {
    fn new(ruler: &mut Ruler, rows: usize) -> Self {
        Self {
            token: ruler.field(rows),
            position: ruler.field(rows),
            end: ruler.field(rows),
            seq: ruler.field(rows),
            spans: ruler.field(4 * rows),
        }
    }
}

#[derive(Clone, Debug)]
struct Layout {
    params: Field,
    out_first: Field,
    out_count: Field,
    full_first: Field,
    sliding_first: Field,
    draft_seq: Field,
    draft_spans: Field,
    draft_recent_at: Field,
    numbers: Field,
    out_source: Field,
    out_before: Field,
    out_recent_at: Field,
    out: RowFields,
    all: RowFields,
    inputs: usize,
    sliding_tables: Field,
    full_tables: Field,
    hidden: Field,
    draft_token: Field,
    draft_position: Field,
    draft_before: Field,
    recent: Field,
    tokens: Field,
    drafts: Field,
    logprobs: Field,
    total: usize,
}

impl Layout {
    fn new(s: &Sizes) -> Self {
        let mut r = Ruler(0);
        let params = r.field(s.seqs * PARAMS);
        let [out_first, out_count, full_first, sliding_first] = [(); 4].map(|()| r.field(s.seqs));
        let draft_seq = r.field(s.seqs);
        let draft_spans = r.field(4 * s.seqs);
        let draft_recent_at = r.field(s.seqs);
        let numbers = r.field(s.seqs);
        let [out_source, out_before, out_recent_at] = [(); 3].map(|()| r.field(s.out_rows));
        let out = RowFields::new(&mut r, s.out_rows);
        let all = RowFields::new(&mut r, s.rows);
        let inputs = r.0;
        let sliding_tables = r.field(s.seqs * s.table(Kind::Sliding));
        let full_tables = r.field(s.seqs * s.table(Kind::Full));
        let [hidden, draft_token, draft_position, draft_before] = [(); 4].map(|()| r.field(s.seqs));
        let recent = r.field(s.seqs * RECENT);
        let tokens = r.field(s.out_rows);
        let drafts = r.field(s.drafts * s.seqs);
        let logprobs = r.field(s.out_rows * LOGPROB_PITCH);
        Self {
            params,
            out_first,
            out_count,
            full_first,
            sliding_first,
            draft_seq,
            draft_spans,
            draft_recent_at,
            numbers,
            out_source,
            out_before,
            out_recent_at,
            out,
            all,
            inputs,
            sliding_tables,
            full_tables,
            hidden,
            draft_token,
            draft_position,
            draft_before,
            recent,
            tokens,
            drafts,
            logprobs,
            total: r.0,
        }
    }
}

/// The arena and its page-locked copy.
pub(super) struct StepArena {
    sizes: Sizes,
    layout: Layout,
    region: Region,
    lists_region: Region,
    host: Option<Pinned>,
    lists_host: Option<Pinned>,
    /// What the step at hand has.
    pub(super) shape: Shape,
    /// Drafts made in this round so far.
    pub(super) drafted: usize,
}

/// What the launches of a step depend on, and nothing else of it does.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    pub(super) rows: usize,
    pub(super) out_rows: usize,
    pub(super) seqs: usize,
    pub(super) all: Cut,
    pub(super) out: Cut,
    /// Rows that draft, pass by pass.
    pub(super) draft_rows: Vec<usize>,
    /// Splits that a drafting row sees, by kind: full, sliding.
    pub(super) draft_splits: [usize; 2],
    pub(super) edits: bool,
    pub(super) logprobs: bool,
}

/// Addresses of what the kernels read of rows.
pub(super) struct RowPointers {
    pub(super) token: DevicePtr,
    pub(super) position: DevicePtr,
    pub(super) end: DevicePtr,
    pub(super) seq: DevicePtr,
    pub(super) spans: DevicePtr,
}

/// Addresses of what sampling reads and writes.
pub(super) struct SamplePointers {
    pub(super) params: DevicePtr,
    pub(super) before: DevicePtr,
    pub(super) recent: DevicePtr,
    pub(super) recent_at: DevicePtr,
    pub(super) lists: DevicePtr,
    pub(super) token: DevicePtr,
    pub(super) drafts: DevicePtr,
    pub(super) logprobs: DevicePtr,
}

impl StepArena {
    pub(super) fn new(card: &mut Card, sizes: Sizes) -> Result<Self, DeviceError> {
        let layout = Layout::new(&sizes);
        let region = card.zeros(layout.total * 4);
        let lists_region = card.zeros(sizes.lists() * 4);
        let (host, lists_host) = match card.device() {
            None => (None, None),
            Some(_) => (
                Some(Pinned::new(layout.total)?),
                Some(Pinned::new(sizes.lists())?),
            ),
        };
        Ok(Self {
            sizes,
            layout,
            region,
            lists_region,
            host,
            lists_host,
            shape: Shape::default(),
            drafted: 0,
        })
    }

    fn at(&self, field: Field) -> DevicePtr {
        self.region.at + 4 * field.start as u64
    }

    /// Rows of a kind in the step at hand.
    pub(super) fn count(&self, rows: Rows) -> usize {
        match rows {
            Rows::All => self.shape.rows,
            Rows::Out => self.shape.out_rows,
            Rows::Draft => self
                .shape
                .draft_rows
                .get(self.drafted)
                .copied()
                .unwrap_or(0),
        }
    }

    pub(super) fn rows(&self, rows: Rows) -> RowPointers {
        let l = &self.layout;
        let pointers = |f: &RowFields| RowPointers {
            token: self.at(f.token),
            position: self.at(f.position),
            end: self.at(f.end),
            seq: self.at(f.seq),
            spans: self.at(f.spans),
        };
        match rows {
            Rows::All => pointers(&l.all),
            Rows::Out => pointers(&l.out),
            Rows::Draft => RowPointers {
                token: self.at(l.draft_token),
                position: self.at(l.draft_position),
                end: self.at(l.draft_position),
                seq: self.at(l.draft_seq),
                spans: self.at(l.draft_spans),
            },
        }
    }

    pub(super) fn sampling(&self, rows: Rows) -> SamplePointers {
        let l = &self.layout;
        let drafting = rows == Rows::Draft;
        let drafts = Field {
            start: l.drafts.start + self.drafted * self.sizes.seqs,
            len: self.sizes.seqs,
        };
        SamplePointers {
            params: self.at(l.params),
            before: self.at(if drafting {
                l.draft_before
            } else {
                l.out_before
            }),
            recent: self.at(if drafting { l.recent } else { l.all.token }),
            recent_at: self.at(if drafting {
                l.draft_recent_at
            } else {
                l.out_recent_at
            }),
            lists: self.lists_region.at,
            token: self.at(if drafting { l.draft_token } else { l.tokens }),
            drafts: if drafting { self.at(drafts) } else { 0 },
            logprobs: self.at(l.logprobs),
        }
    }

    /// Tables of a kind, and which page of a sequence each begins with.
    pub(super) fn tables(&self, kind: Kind) -> (DevicePtr, DevicePtr) {
        let l = &self.layout;
        match kind {
            Kind::Full => (self.at(l.full_tables), self.at(l.full_first)),
            Kind::Sliding => (self.at(l.sliding_tables), self.at(l.sliding_first)),
        }
    }

    /// The input row of each emitting row.
    pub(super) fn out_source(&self) -> DevicePtr {
        self.at(self.layout.out_source)
    }

    /// 0, 1, 2, ...
    pub(super) fn numbers(&self) -> DevicePtr {
        self.at(self.layout.numbers)
    }

    /// Where a sequence's emitting rows begin, how many they are, and what they emit.
    pub(super) fn emitting(&self) -> (DevicePtr, DevicePtr, DevicePtr) {
        let l = &self.layout;
        (
            self.at(l.out_first),
            self.at(l.out_count),
            self.at(l.recent),
        )
    }

    /// The emitting row that each drafting row starts from.
    pub(super) fn hidden(&self) -> DevicePtr {
        self.at(self.layout.hidden)
    }

    /// Takes a step in and sends it. Whoever calls has waited for the step before.
    pub(super) fn send(
        &mut self,
        card: &Card,
        arena: &Arena,
        group_rows: usize,
    ) -> Result<(), StepError> {
        self.drafted = 0;
        self.shape = Shape::default();
        let (Some(mut host), Some(mut lists)) = (self.host.take(), self.lists_host.take()) else {
            return card.device().map_or(Ok(()), |_| Err(StepError::Room));
        };
        let filled = self.fill(&mut host, &mut lists, arena, group_rows);
        let sent = filled.and_then(|words| Ok(self.upload(card, &host, &lists, words)?));
        (self.host, self.lists_host) = (Some(host), Some(lists));
        sent
    }

    /// Everything but the copies; returns the words of lists.
    fn fill(
        &mut self,
        host: &mut [u32],
        list_words: &mut [u32],
        arena: &Arena,
        group_rows: usize,
    ) -> Result<usize, StepError> {
        let (sizes, layout) = (self.sizes, self.layout.clone());
        let mut writer = lists::Writer::new(list_words);
        for (i, seq) in arena.seqs.iter().enumerate() {
            let params = match &seq.params {
                None => SampleParams::default(),
                Some(params) => writer.write(seq, params).ok_or(StepError::Lists)?,
            };
            let at = layout.params.start + i * PARAMS;
            host[at..at + PARAMS].copy_from_slice(&params.words());
            host[layout.out_first.start + i] = seq.out.start as u32;
            host[layout.out_count.start + i] = seq.out.len() as u32;
            host[layout.full_first.start + i] = 0;
            let (first, sliding, full) = arena.tables(i);
            host[layout.sliding_first.start + i] = first as u32;
            for (field, kind, table) in [
                (layout.sliding_tables, Kind::Sliding, sliding),
                (layout.full_tables, Kind::Full, full),
            ] {
                let pitch = sizes.table(kind);
                if table.len() > pitch {
                    return Err(StepError::Table(table.len(), pitch));
                }
                let at = field.start + i * pitch;
                host[at..at + table.len()].copy_from_slice(table);
            }
            if let Some(params) = &seq.params {
                self.shape.logprobs |= params.logprobs > 0;
                self.shape.edits |= !seq.masks.is_empty()
                    || params.reads_history()
                    || !params.logit_bias.is_empty()
                    || !params.suppressed.is_empty()
                    || params.min_tokens > seq.generated;
            }
        }
        self.shape.rows = arena.all.rows.len();
        self.shape.out_rows = arena.out.rows.len();
        self.shape.seqs = arena.seqs.len();
        for (i, &source) in arena.out_source.iter().enumerate() {
            let row = &arena.out.rows[i];
            let before = i - arena.seqs[row.seq].out.start;
            host[layout.out_source.start + i] = source as u32;
            host[layout.out_before.start + i] = before as u32;
            host[layout.out_recent_at.start + i] = (source + 1 - before) as u32;
        }
        let known: Vec<u32> = arena
            .all
            .spans
            .iter()
            .map(|span| arena.all.rows[span.start].position as u32)
            .collect();
        let mut write =
            |fields, set| write_rows(host, fields, set, &known, group_rows, sizes.window);
        self.shape.all = write(&layout.all, &arena.all);
        self.shape.out = write(&layout.out, &arena.out);
        self.plan_drafts(host, &layout, arena);
        Ok(writer.len())
    }

    /// The rows that draft, those that want most first, so that each pass has the first of them.
    fn plan_drafts(&mut self, host: &mut [u32], layout: &Layout, arena: &Arena) {
        let wanting = arena.wanting_drafts();
        let passes = wanting.first().map_or(0, |(_, wanted)| *wanted);
        self.shape.draft_rows = (0..passes)
            .map(|pass| wanting.iter().filter(|(_, wanted)| *wanted > pass).count())
            .collect();
        let mut splits = [0; 2];
        for (row, &(seq, _)) in wanting.iter().enumerate() {
            host[layout.draft_seq.start + row] = seq as u32;
            host[layout.draft_recent_at.start + row] = (seq * RECENT) as u32;
            let at = layout.draft_spans.start + 4 * row;
            // All keys that it sees are there.
            host[at..at + 4].copy_from_slice(&[row as u32, 1, seq as u32, u32::MAX]);
            host[layout.numbers.start + row] = row as u32;
            // How many drafts were right is not known yet: the least and the most keys.
            let out = &arena.out.rows[arena.seqs[seq].out.clone()];
            let ends = (out[0].position + 1, out[out.len() - 1].position + 1);
            let seen = super::groups::splits(ends.0, ends.1, self.sizes.window);
            splits = [splits[0].max(seen[0]), splits[1].max(seen[1])];
        }
        self.shape.draft_splits = splits.map(super::groups::bucket);
    }

    fn upload(
        &self,
        card: &Card,
        host: &Pinned,
        lists: &Pinned,
        list_words: usize,
    ) -> Result<(), DeviceError> {
        let Some(device) = card.device() else {
            return Ok(());
        };
        let (l, s) = (&self.layout, &self.sizes);
        let used = |field: Field, kind| field.start..field.start + self.shape.seqs * s.table(kind);
        for range in [
            0..l.inputs,
            used(l.sliding_tables, Kind::Sliding),
            used(l.full_tables, Kind::Full),
        ] {
            let to = self.region.at + 4 * range.start as u64;
            copy_in(device, to, host, range)?;
        }
        copy_in(device, self.lists_region.at, lists, 0..list_words)
    }

    /// Brings the results to the host once all earlier work is done; the caller waits.
    pub(super) fn fetch(&mut self, card: &Card) -> Result<(), DeviceError> {
        let (Some(device), Some(host)) = (card.device(), self.host.as_mut()) else {
            return Ok(());
        };
        let l = &self.layout;
        let mut end = l.drafts.range().end;
        if self.shape.logprobs {
            end = l.logprobs.start + self.shape.out_rows * LOGPROB_PITCH;
        }
        copy_out(device, host, l.tokens.start..end, self.region.at)
    }

    /// The token that an emitting row chose.
    pub(super) fn token(&self, out_row: usize) -> TokenId {
        self.result(self.layout.tokens, out_row)
    }

    /// A drafting row's draft of a pass.
    pub(super) fn draft(&self, pass: usize, row: usize) -> TokenId {
        self.result(self.layout.drafts, pass * self.sizes.seqs + row)
    }

    /// Log-probabilities of an emitting row: its own, then (token, value) of the likeliest.
    pub(super) fn logprobs(&self, out_row: usize, wanted: usize) -> (f32, Vec<(TokenId, f32)>) {
        let word = |i| self.result(self.layout.logprobs, out_row * LOGPROB_PITCH + i);
        let value = |i| f32::from_bits(word(i));
        let count = wanted.min(LOGPROBS).min(self.sizes.vocab + 1);
        let top = (1..count).map(|n| (word(2 * n - 1), value(2 * n)));
        (value(0), top.collect())
    }

    fn result(&self, field: Field, i: usize) -> u32 {
        let host = self.host.as_ref();
        host.map_or(0, |host| host[field.range()][i])
    }
}

#[allow(unsafe_code, reason = "addresses of the arena's own region")]
fn copy_in(
    device: &marathon_kernels::device::Device,
    to: DevicePtr,
    from: &Pinned,
    range: Range<usize>,
) -> Result<(), DeviceError> {
    if range.is_empty() {
        return Ok(());
    }
    // SAFETY: the region is as long as its page-locked copy, and the executor waits for the step
    // before it fills the copy again.
    unsafe { device.send(to, from, range) }
}

#[allow(unsafe_code, reason = "addresses of the arena's own region")]
fn copy_out(
    device: &marathon_kernels::device::Device,
    to: &mut Pinned,
    range: Range<usize>,
    region: DevicePtr,
) -> Result<(), DeviceError> {
    let from = region + 4 * range.start as u64;
    // SAFETY: as above; the executor reads the results after it has waited.
    unsafe { device.fetch(to, range, from) }
}

/// `known` is, by sequence, the first position that the step writes.
fn write_rows(
    host: &mut [u32],
    fields: &RowFields,
    set: &RowSet,
    known: &[u32],
    group_rows: usize,
    window: usize,
) -> Cut {
    for (i, row) in set.rows.iter().enumerate() {
        host[fields.token.start + i] = row.token;
        host[fields.position.start + i] = row.position as u32;
        host[fields.end.start + i] = row.end as u32;
        host[fields.seq.start + i] = row.seq as u32;
    }
    let (spans, cut) = group(set, group_rows, window);
    for (i, Span { seq, start, count }) in spans.into_iter().enumerate() {
        let at = fields.spans.start + 4 * i;
        host[at..at + 4].copy_from_slice(&[start as u32, count as u32, seq as u32, known[seq]]);
    }
    cut
}

/// A step that the arena cannot take.
#[derive(Debug, thiserror::Error)]
pub(super) enum StepError {
    /// Penalties, biases and bans of all requests together are too long.
    #[error("the requests' token lists are too long for the step arena")]
    Lists,
    /// More blocks than a sequence can have.
    #[error("a table of {0} blocks where {1} fit")]
    Table(usize, usize),
    /// A panic in an earlier step took the page-locked copy with it.
    #[error("the step arena was lost in a step that panicked")]
    Room,
    /// The card failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
