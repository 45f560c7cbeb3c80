//! The text side of a checkpoint: its tokenizer and its chat template, checked against each other.

use std::sync::Arc;

use super::{
    append::{self, AppendError, GenerationPrompts},
    conversation::{Conversation, Message},
    template::{Template, TemplateError},
    tokenizer::Tokenizer,
};
use crate::{constrain::Grammars, sched::types::TokenId};

/// Everything that turns messages into tokens and back for one model.
pub struct TextModel {
    tokenizer: Arc<Tokenizer>,
    template: Template,
    prompts: GenerationPrompts,
    grammars: Grammars,
}

impl TextModel {
    /// Puts the two together. Fails when the template cannot render a simple conversation.
    pub fn new(tokenizer: Arc<Tokenizer>, template: Template) -> Result<Self, TemplateError> {
        let prompts = GenerationPrompts::of(&template)?;
        Ok(Self {
            grammars: Grammars::new(tokenizer.clone()),
            tokenizer,
            template,
            prompts,
        })
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    /// The chat template.
    pub fn template(&self) -> &Template {
        &self.template
    }

    /// Compiles the forms that answers must have.
    pub fn grammars(&self) -> &Grammars {
        &self.grammars
    }

    /// The tokens of a conversation.
    pub fn render(
        &self,
        conversation: &Conversation,
        generation_prompt: bool,
    ) -> Result<Vec<TokenId>, TemplateError> {
        self.template
            .encode(conversation, generation_prompt, &self.tokenizer)
    }

    /// The tokens that append messages to given ones.
    pub fn append(
        &self,
        tokens: &[TokenId],
        messages: &[Message],
        thinking: bool,
        generation_prompt: bool,
    ) -> Result<Vec<TokenId>, AppendError> {
        append::encode(
            &self.prompts,
            tokens,
            messages,
            thinking,
            generation_prompt,
            &self.tokenizer,
        )
    }
}
