// A slider's number box would put the nearest allowed value in the place of any other, without a word. The server has words.
document.addEventListener("blur", (event) => {
  if (event.target.type === "number") event.stopPropagation();
}, true);

// Gradio sends one request at a time, but only once the click is handled does it know that one is under way. Until then
// this drops another.
let sent = false;
const once = (event) => {
  if (sent) {
    event.preventDefault();
    event.stopPropagation();
  }
  sent = true;
  setTimeout(() => { sent = false; });
};
document.addEventListener("click", (event) => {
  if (event.target.closest("#write, #match")) once(event);
}, true);
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && event.target.closest("#prompt")) once(event);
}, true);
