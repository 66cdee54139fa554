// A conversation and the list of all, as elements; `act` is what the buttons call.

const NAMES = {user: "You", assistant: "The model", error: "Error"};

function button(label, action, properties = {}) {
  const made = element("button", {type: "button", textContent: label, ...properties});
  made.addEventListener("click", () => action(made));
  return made;
}

class View {
  constructor(act) { this.act = act; }

  // The whole conversation; error: what went wrong with the last answer.
  show(conversation, error) {
    const last = conversation.messages.length - 1, follows = conversation !== this.shown || this.isAtEnd();
    this.shown = conversation;
    $("talk").replaceChildren(...conversation.messages.map((message, i) => this.message(message, i, i === last && !error)));
    if (error) {
      const line = element("article", {className: "error"}, element("span", {textContent: error.message}), " ");
      line.append(button("Try again", () => this.act.regenerate()));
      $("talk").append(line);
    }
    if (follows) this.toEnd();
  }

  message(message, i, isLast) {
    const made = element("article", {className: message.role, ariaLabel: NAMES[message.role]});
    if (message.dropped) made.classList.add("dropped");
    if (message.images?.length)
      made.append(element("div", {className: "images"}, ...message.images.map(url => element("img", {src: url, alt: "Attached image"}))));
    const body = element("div", {className: "body"});
    made.append(body);
    this.fill(body, message);
    const actions = element("div", {className: "actions"}, button("Copy", made => copied(message.content, made)));
    if (message.role === "user" && !message.dropped) actions.append(button("Edit", () => this.edit(made, body, message, i)));
    if (message.role === "assistant" && isLast) actions.append(button("Regenerate", () => this.act.regenerate()));
    made.append(actions);
    return made;
  }

  fill(body, message) {
    if (message.role === "user") { body.textContent = message.content; return; }
    const parts = [];
    if (message.reasoning)
      parts.push(element("details", {open: !message.content}, element("summary", {textContent: "Reasoning"}), message.reasoning));
    body.replaceChildren(...parts, markdown(message.content));
  }

  edit(article, body, message, i) {
    const area = element("textarea", {className: "editor", value: message.content, rows: 3, ariaLabel: "Edit the message"});
    const done = () => { if (area.value.trim()) this.act.edited(i, area.value.trim()); };
    area.addEventListener("keydown", event => {
      if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); done(); }
      if (event.key === "Escape") { event.stopPropagation(); this.act.redraw(); }
    });
    const actions = element("div", {className: "actions"}, button("Send again", done), button("Cancel", () => this.act.redraw()));
    article.replaceChildren(area, actions);
    area.focus();
  }

  // A place for an answer that is coming; returns what to call with its message as it grows.
  growing() {
    const body = element("div", {className: "body"});
    const article = element("article", {className: "assistant", ariaLabel: NAMES.assistant}, body);
    $("talk").append(article);
    this.toEnd();
    let due = false, latest = null;
    return message => {
      latest = message;
      if (due) return;
      due = true;
      requestAnimationFrame(() => {
        due = false;
        const follows = this.isAtEnd();
        this.fill(body, latest);
        if (follows) this.toEnd();
      });
    };
  }

  // Whether the reader has not scrolled up: then the text is followed.
  isAtEnd() {
    const talk = $("talk");
    return talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
  }

  toEnd() { $("talk").scrollTo({top: $("talk").scrollHeight, behavior: "instant"}); }

  list(conversations, current) {
    $("list").replaceChildren(...conversations.map(each => {
      const title = each.title || "New conversation";
      const open = button(title, () => this.act.open(each.id), {className: "title", title});
      const rename = button("✎", () => this.rename(line, each), {className: "small", ariaLabel: `Rename ${title}`});
      const remove = button("×", made => {
        if (made.textContent === "×") { made.textContent = "Delete?"; return; }
        this.act.remove(each.id);
      }, {className: "small", ariaLabel: `Delete ${title}`});
      remove.addEventListener("blur", () => { remove.textContent = "×"; });
      const line = element("li", {className: each.id === current ? "current" : ""}, open, rename, remove);
      if (each.id === current) open.ariaCurrent = "true";
      return line;
    }));
  }

  rename(line, conversation) {
    const input = element("input", {value: conversation.title, ariaLabel: "Name of the conversation"});
    const done = () => this.act.renamed(conversation.id, input.value.trim());
    input.addEventListener("keydown", event => {
      if (event.key === "Enter") done();
      if (event.key === "Escape") { input.removeEventListener("blur", done); this.act.renamed(conversation.id, conversation.title); }
    });
    input.addEventListener("blur", done, {once: true});
    line.replaceChildren(input);
    input.select();
  }
}
