//! One tool call: intent, act, result; and what becomes of a call that was cut off in between.

use std::{sync::Arc, time::Instant};

use super::{Driver, DriverError, Halt, ledger::blocking};
use crate::{
    journal::Durability,
    run::{
        entry::{Entry, ResultOrigin, ToolEnded, ToolIntended},
        event::RunEvent,
        prompt::shorten,
    },
    tools::{Class, Execution, Facts, Standing, Tool, ToolCall, ToolContext, ToolOutput},
};

/// Longest result kept, in bytes. Tools cap their own; this holds for all.
const LONGEST_RESULT: usize = 64 << 10;

impl Driver {
    /// Looks at the next call and journals its intent, or its refusal.
    pub(super) async fn prepare(&mut self, call: u64, request: ToolCall) -> Result<(), Halt> {
        let Some(tool) = self.parts.tools.find(&request.name) else {
            let names = self.parts.tools.names().join(", ");
            let text = format!("no tool {}; there are: {names}", request.name);
            return self.refuse(call, &request, ToolOutput::error(text)).await;
        };
        let (class, context) = (tool.class(), self.context(call));
        let asked = request.clone();
        let looked = on_thread(move || Ok(tool.prepare(&asked, &context))).await;
        let facts = match looked {
            Ok(Ok(facts)) => facts,
            Ok(Err(refusal)) => return self.refuse(call, &request, refusal).await,
            Err(crash) => return self.refuse(call, &request, crash).await,
        };
        self.parts.fail.hit("before-intent");
        let intent = ToolIntended {
            call,
            request,
            class,
            facts,
        };
        let entry = Entry::ToolIntended(Box::new(intent));
        self.ledger.commit(vec![entry], Durability::Synced).await?;
        self.fresh_intent = Some(call);
        Ok(())
    }

    /// Has the tool act, or finds out what became of a call that an earlier process intended.
    pub(super) async fn settle(&mut self, intent: ToolIntended) -> Result<(), Halt> {
        let fresh = self.fresh_intent.take() == Some(intent.call);
        self.tell(&RunEvent::ToolStarted {
            call: intent.call,
            name: intent.request.name.clone(),
            arguments: intent.request.arguments.clone(),
            class: intent.class,
            in_doubt: !fresh,
        });
        if fresh {
            self.parts.fail.hit("after-intent");
        }
        let began = Instant::now();
        let (output, origin) = match self.parts.tools.find(&intent.request.name) {
            None => {
                let text = format!(
                    "the outcome is unknown: this pilot has no tool {}",
                    intent.request.name
                );
                (ToolOutput::error(text), ResultOrigin::Unknown)
            }
            Some(tool) if fresh => (self.execute(tool, &intent).await?, ResultOrigin::Executed),
            Some(tool) => self.recover(tool, &intent).await?,
        };
        self.parts.fail.hit("after-tool");
        let elapsed_ms = began.elapsed().as_millis() as u64;
        self.end(intent.call, &intent.request, output, origin, elapsed_ms)
            .await
    }

    /// Decides a call in doubt by its class: run again, look, or say that nobody knows.
    async fn recover(
        &self,
        tool: Arc<dyn Tool>,
        intent: &ToolIntended,
    ) -> Result<(ToolOutput, ResultOrigin), Halt> {
        if matches!(intent.class, Class::Pure | Class::Idempotent) {
            return Ok((self.execute(tool, intent).await?, ResultOrigin::Reran));
        }
        let standing = self.inspect(Arc::clone(&tool), intent).await?;
        match standing {
            Standing::Done(output) => Ok((output, ResultOrigin::VerifiedDone)),
            Standing::Redo => Ok((
                self.execute(tool, intent).await?,
                ResultOrigin::VerifiedMissing,
            )),
            Standing::Torn => {
                if let Err(trouble) = self.repair(Arc::clone(&tool), intent).await? {
                    return Ok((trouble, ResultOrigin::Unknown));
                }
                Ok((self.execute(tool, intent).await?, ResultOrigin::Repaired))
            }
            Standing::Unknown(known) => {
                let text = format!("the outcome is unknown: {known}");
                Ok((ToolOutput::error(text), ResultOrigin::Unknown))
            }
        }
    }

    async fn execute(
        &self,
        tool: Arc<dyn Tool>,
        intent: &ToolIntended,
    ) -> Result<ToolOutput, Halt> {
        let (call, facts, context) = self.owned(intent);
        let ran = on_thread(move || Ok(tool.execute(&call, &facts, &context))).await;
        match ran {
            Ok(Execution::Ended(output)) => Ok(output),
            Ok(Execution::Interrupted) => Err(Halt::Stop),
            Err(crash) => Ok(crash),
        }
    }

    async fn inspect(&self, tool: Arc<dyn Tool>, intent: &ToolIntended) -> Result<Standing, Halt> {
        let (call, facts, context) = self.owned(intent);
        let looked = on_thread(move || Ok(tool.inspect(&call, &facts, &context))).await;
        Ok(looked.unwrap_or_else(|crash| Standing::Unknown(crash.text)))
    }

    async fn repair(
        &self,
        tool: Arc<dyn Tool>,
        intent: &ToolIntended,
    ) -> Result<Result<(), ToolOutput>, Halt> {
        let (call, facts, context) = self.owned(intent);
        let repaired = on_thread(move || Ok(tool.repair(&call, &facts, &context))).await;
        Ok(repaired.unwrap_or_else(Err))
    }

    async fn refuse(
        &mut self,
        call: u64,
        request: &ToolCall,
        output: ToolOutput,
    ) -> Result<(), Halt> {
        self.end(call, request, output, ResultOrigin::Refused, 0)
            .await
    }

    async fn end(
        &mut self,
        call: u64,
        request: &ToolCall,
        mut output: ToolOutput,
        origin: ResultOrigin,
        elapsed_ms: u64,
    ) -> Result<(), Halt> {
        output.text = shorten(&output.text, LONGEST_RESULT);
        let event = RunEvent::ToolEnded {
            call,
            name: request.name.clone(),
            text: output.text.clone(),
            error: output.error,
            origin,
            elapsed_ms,
        };
        let entry = Entry::ToolEnded(Box::new(ToolEnded {
            call,
            output,
            origin,
            elapsed_ms,
        }));
        self.ledger.commit(vec![entry], Durability::Synced).await?;
        self.tell(&event);
        self.parts.fail.hit("after-result");
        Ok(())
    }

    fn context(&self, call: u64) -> ToolContext {
        ToolContext {
            workspace: self.state().created.workspace.clone().into(),
            spool: self.parts.spool.clone(),
            call,
            cancel: self.parts.cancel.clone(),
            fail: Arc::clone(&self.parts.fail),
        }
    }

    fn owned(&self, intent: &ToolIntended) -> (ToolCall, Facts, ToolContext) {
        (
            intent.request.clone(),
            intent.facts.clone(),
            self.context(intent.call),
        )
    }
}

/// Runs a tool's method off the async threads. A panic in it is the call's error, not pilot's end.
async fn on_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, DriverError> + Send + 'static,
) -> Result<T, ToolOutput> {
    blocking(work)
        .await
        .map_err(|error| ToolOutput::error(format!("the tool failed: {error}")))
}
